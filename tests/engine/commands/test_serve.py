"""``vericache serve``: bad flags, and the engine in processes of its own against stock vLLM."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import OpenAI

from benchmarks.server import command
from tests.engine.conftest import OUTPUT_TOKENS, stock_output
from vericache.demo.worker import ENVIRONMENT


def test_concurrent_completions_are_stock_vllms(
    client: OpenAI, small_folder: Path, texts: dict[str, list[int]]
) -> None:
    some = dict(list(texts.items())[:3])
    extra = {"ignore_eos": True, "return_token_ids": True}
    with ThreadPoolExecutor() as pool:
        answers = pool.map(
            lambda ids: client.completions.create(
                model="demo", prompt=ids, max_tokens=OUTPUT_TOKENS, temperature=0, extra_body=extra
            ),
            some.values(),
        )
        found = dict(zip(some, answers, strict=True))
    stock = stock_output(small_folder, some)
    for name, answer in found.items():
        assert answer.choices[0].token_ids == stock[name]
        assert answer.kv_transfer_params["vericache"]["mode"] == "draft"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vericache-ratio", "1.5"], "ratio"),
        (["--vericache-compresor", "kvzip"], "--vericache-compressor"),
        (["--pipeline-parallel-size", "2"], "pipeline"),
    ],
)
def test_bad_flags_are_one_clear_line(small_folder: Path, arguments: list[str], message: str) -> None:
    result = subprocess.run(
        command(small_folder, *arguments),
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("vericache serve: ")
    assert message in last
