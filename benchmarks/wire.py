"""How small is KV on the wire, and how fast does it get there? ``python -m benchmarks.wire``: bits per element and
MB/s of the wire codec on real KV, that of the bundled prompts in the bundled model (bfloat16). Writes JSON and a table
into docs/results/; ``--render FILE`` makes the table of a JSON.
"""

import argparse
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import command, machine, save, table
from compressors.wire import Bins, decode, encode, fake_quant

CHUNK = 256
DEFAULT = "default (32, 16)"
CHOICES = (DEFAULT, "8", "16", "32", "64", "256")


def bins_of(choice: str, layers: int) -> Bins:
    return Bins.of(layers) if choice == DEFAULT else Bins((int(choice),) * layers, (int(choice),) * layers)


@torch.no_grad()
def caches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values ``[L, H, n, D]`` of the first bundled prompts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from vericache.demo import model, prompts

    folder = model.prepare()
    texts = prompts.load(list(prompts.PROMPTS)[:count], AutoTokenizer.from_pretrained(folder))
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    found = []
    for ids in texts.values():
        layers = network(torch.tensor([ids]), logits_to_keep=1).past_key_values.layers
        found.append((torch.cat([layer.keys for layer in layers]), torch.cat([layer.values for layer in layers])))
    return found


def one(name: str, kv: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    bits, errors, encoding, decoding = [], [], [], []
    for keys, values in kv:
        bins, elements = bins_of(name, len(keys)), 2 * keys.numel()
        start = time.perf_counter()
        message = encode(keys, values, bins, CHUNK)
        middle = time.perf_counter()
        arrived = decode(message)
        end = time.perf_counter()
        expected = fake_quant(keys, values, bins)
        if not all(torch.equal(a, b) for a, b in zip(arrived, expected, strict=True)):
            raise RuntimeError("what arrived is not what was sent")
        bits.append(8 * len(message) / elements)
        errors.append([error(x, y) for x, y in zip((keys, values), arrived, strict=True)])
        encoding.append(2e-6 * elements / (middle - start))
        decoding.append(2e-6 * elements / (end - middle))
    key_errors, value_errors = zip(*errors, strict=True)
    return {
        "bins": name, "bits": bits, "key_error": median(key_errors), "value_error": median(value_errors),
        "encode_mb_s": median(encoding), "decode_mb_s": median(decoding),
    }  # fmt: skip


def error(x: Tensor, lossy: Tensor) -> float:
    """Root mean square, over that of the tensor."""
    return float((x.float() - lossy.float()).norm() / x.float().norm())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    kv = caches(args.prompts)
    short = [(keys[:, :, -CHUNK:].contiguous(), values[:, :, -CHUNK:].contiguous()) for keys, values in kv]
    return {
        "date": date.today().isoformat(), "machine": machine(), "prompts": len(kv),
        "context": round(sum(keys.shape[2] for keys, _ in kv) / len(kv)),
        "whole": [one(name, kv) for name in CHOICES], "chunk": [one(name, short) for name in CHOICES],
    }  # fmt: skip


def render(result: dict[str, Any], out: Path) -> None:
    rows = []
    for whole, chunk in zip(result["whole"], result["chunk"], strict=True):
        bits = whole["bits"]
        rows.append([
            whole["bins"], f"{min(bits):.2f} / {median(bits):.2f} / {max(bits):.2f}", f"{median(bits) / 16:.3f}",
            f"{median(chunk['bits']):.2f}", f"{whole['key_error']:.3f} / {whole['value_error']:.3f}",
            f"{whole['encode_mb_s']:.0f}", f"{whole['decode_mb_s']:.0f}", f"{chunk['decode_mb_s']:.0f}",
        ])  # fmt: skip
    header = ["bins", "bits per element", "of bfloat16", f"alone: {CHUNK} tokens", "error K / V", "encode", "decode",
              f"decode {CHUNK} tokens"]  # fmt: skip
    lines = [
        "# KV on the wire",
        "",
        f"`python -m benchmarks.wire`, {result['date']}, {result['machine']}, one thread.",
        f"SmolLM2-135M-Instruct, bfloat16, {result['prompts']} prompts of {result['context']} tokens on average,",
        f"chunks of {CHUNK} tokens. Bits per element count the whole message (min / median / max over prompts);",
        f"a message of {CHUNK} tokens alone carries distributions as large as those of a long one. Error: root mean",
        "square over that of the tensor. Speeds in MB/s of bfloat16 KV, medians.",
        "",
        *table(header, rows),
        "",
    ]
    save(out, "wire", result, "\n".join(lines))


if __name__ == "__main__":
    command(__doc__, measure, render, {"--prompts": {"type": int, "default": 8}})
