"""A thousand short mixed requests against a live server: ``python -m benchmarks.soak``.

Starts ``vericache serve`` on the bundled model, keeps eight requests in flight, and mixes prompts, samplers, stops,
limits, structured outputs, streams, and clients that leave. Some requests are asked again with drafting off, and must
be answered alike. Afterwards nothing may be lost or held: every request has an answer or was given up by its client,
and every gauge is back to rest. Writes JSON and a table into docs/results/soak.*.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from httpx import HTTPError
from openai import AsyncOpenAI, OpenAIError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.report import RESULTS, machine, save, table
from benchmarks.server import LiveServer
from vericache.demo import model, prompts

REST = ("vericache_requests", "vericache_host_store_bytes", "vericache_arena_bytes", "vericache_link_ring_ratio")
VLLM_REST = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
FLAGS = (
    "--dtype float32 --max-model-len 1024 --block-size 32 --kv-cache-memory-bytes 1073741824 --served-model-name soak "
    "--vericache-mode draft --vericache-min-prompt-tokens 150 --vericache-draft-length 8 --vericache-compressor snapkv"
)
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def wish(rng: random.Random, texts: Sequence[list[int]]) -> tuple[dict[str, Any], int | None]:
    """The body of one request, and after how many chunks its client leaves (None: it stays)."""
    text = rng.choice(texts)
    start = rng.randrange(0, len(text) // 2)
    length = rng.choice([40, 170, 220, 300])
    extra: dict[str, Any] = {"ignore_eos": rng.random() < 0.5}
    body: dict[str, Any] = {
        "model": "soak",
        "prompt": text[start : start + length],
        "max_tokens": rng.choice([1, 2, 5, 16, 33, 48]),
        "temperature": rng.choice([0.0, 0.0, 0.7]),
        "seed": rng.randrange(1 << 30),
        "stream": rng.random() < 0.5,
        "extra_body": extra,
    }
    kind = rng.choice(["plain", "stop", "logprobs", "penalties", "n", "json", "regex", "options", "min_tokens"])
    if kind == "stop":
        body["stop"] = rng.sample([" the", ".", "\n", "e", " of", ","], 2)
    elif kind == "logprobs":
        body["logprobs"] = rng.choice([0, 3])
    elif kind == "penalties":
        body |= {"presence_penalty": 0.4, "frequency_penalty": 0.3}
    elif kind == "n":
        body |= {"n": 2, "temperature": 0.9}
    elif kind == "json":
        extra["structured_outputs"] = {"json": SCHEMA}
    elif kind == "regex":
        extra["structured_outputs"] = {"regex": r"(\d{2}-){3}\d{2}"}
    elif kind == "options":
        extra["vllm_xargs"] = {
            "vericache_mode": rng.choice(["off", "draft"]),
            "vericache_draft_length": rng.choice([1, 30]),
        }
    elif kind == "min_tokens":
        extra["min_tokens"] = min(10, body["max_tokens"])
    leaves = rng.choice([0, 1, 3]) if rng.random() < 0.15 else None
    if leaves is not None:
        body["stream"] = True
    return body, leaves


async def send(client: AsyncOpenAI, body: dict[str, Any], leaves: int | None) -> str:
    """Outcome of one request: answered, left, or what went wrong. A third of those not streamed ask twice."""
    try:
        answer = await client.completions.create(**body)
        if not body["stream"]:
            if body["seed"] % 3 == 0:
                off = {"vllm_xargs": {"vericache_mode": "off"}}
                twin = await client.completions.create(**{**body, "extra_body": {**body["extra_body"], **off}})
                return "answered alike" if said(answer) == said(twin) else f"differs: {said(answer)} {said(twin)}"
            return "answered" if all(c.finish_reason for c in answer.choices) else "unfinished"
        reasons: set[int] = set()
        chunks = 0
        async for chunk in answer:
            if leaves is not None and chunks >= leaves:
                await answer.close()
                return "left"
            chunks += 1
            reasons |= {c.index for c in chunk.choices if c.finish_reason}
        return "answered" if len(reasons) == body.get("n", 1) else "unfinished"
    except (OpenAIError, HTTPError) as error:
        return f"{type(error).__name__}: {error}"[:200]


def said(answer: Any) -> list[tuple[str, str]]:
    return [(choice.text, choice.finish_reason) for choice in answer.choices]


async def soak(url: str, texts: Sequence[list[int]], args: argparse.Namespace, progress: Progress) -> Counter[str]:
    client = AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=300)
    rng, outcomes, task = random.Random(args.seed), Counter[str](), progress.add_task("requests", total=args.requests)
    pending = iter([wish(rng, texts) for _ in range(args.requests)])

    async def one_after_the_other() -> None:
        for body, leaves in pending:
            outcomes[await send(client, body, leaves)] += 1
            progress.advance(task)

    await asyncio.gather(*(one_after_the_other() for _ in range(args.concurrency)))
    return outcomes


def at_rest(server: LiveServer, seconds: float) -> dict[str, float]:
    """Gauges that are not zero after the given time, by name."""
    deadline = time.monotonic() + seconds
    while True:
        values = server.series()
        busy = {name: values[name] for name in (*REST, *VLLM_REST) if values[name]}
        if not busy or time.monotonic() > deadline:
            return busy
        time.sleep(1)


@contextmanager
def served(folder: Path, console: Console) -> Iterator[LiveServer]:
    with tempfile.TemporaryDirectory() as temporary:
        server = LiveServer(folder, FLAGS.split(), Path(temporary) / "log")
        try:
            with console.status("starting the server"):
                server.wait_until_healthy()
            yield server
        finally:
            server.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="a model folder instead of the bundled model")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of soak.json and soak.md")
    args = parser.parse_args(argv)
    console = Console()
    folder = args.model or model.prepare()
    from transformers import AutoTokenizer

    texts = list(prompts.load(list(prompts.PROMPTS), AutoTokenizer.from_pretrained(folder), 480).values())
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with served(folder, console) as server:
        began = time.monotonic()
        with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:
            outcomes = asyncio.run(soak(server.url, texts, args, progress))
        seconds = time.monotonic() - began
        with console.status("waiting for rest"):
            busy, values = at_rest(server, 120), server.series()
    differ = sum(n for k, n in outcomes.items() if k.startswith("differs"))
    lost = {k: n for k, n in outcomes.items() if k not in ("answered", "answered alike", "left")}
    numbers = {
        "requests": args.requests,
        "answered": outcomes["answered"],
        "left by their client": outcomes["left"],
        "answered twice, alike": outcomes["answered alike"],
        "answered twice, differently": differ,
        "lost": sum(lost.values()) - differ,
        "rounds": int(values["vericache_rounds_total"]),
        "gauges not at rest": len(busy),
        "seconds": round(seconds),
    }
    write(args, {"model": folder.name, **numbers, "lost_or_different": lost, "busy": busy}, numbers, console)
    for error, count in lost.items():
        console.print(f"[red]{count} x {error}[/red]")
    return 1 if lost or busy or not numbers["rounds"] else 0


def write(args: argparse.Namespace, report: Mapping[str, Any], numbers: Mapping[str, int], console: Console) -> None:
    about = {"date": date.today().isoformat(), "machine": machine(), "concurrency": args.concurrency, "seed": args.seed}
    rows = table(["", ""], [[name, f"{value:,}"] for name, value in numbers.items()], left=1)
    head = [
        f"`python -m benchmarks.soak`, {about['date']}, {about['machine']}.",
        f"{report['model']}, float32, snapkv,",
    ]
    head.append(f"{args.concurrency} requests at a time.")
    save(args.out, "soak", {**about, **report}, "\n".join(["# Soak", "", *head, "", *rows]))
    console.print("\n".join(rows))


if __name__ == "__main__":
    raise SystemExit(main())
