"""Which layers can do with fewer bits? ``python -m benchmarks.layer_bits --mean-bits 3 --out settings.yaml`` writes the
widths of a model's layers as VeriCache settings: ``layer_bits`` for ``page_format: turboquant_mixed``.

As in KVTuner (Li et al., 2025, arXiv 2502.04420), a layer's sensitivity to a pair of widths, of keys and of values, is
the relative error of its attention's output when the KV it reads is rounded and its queries are exact; here of a
prompt's last tokens, averaged over the bundled prompts. The pairs are those whose errors have the least sum
(``compressors.bits.bits_of_layers``).
"""

import argparse
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import yaml
from rich.console import Console
from torch import Tensor
from transformers import AutoTokenizer

from compressors.bits import Pair, bits_of_layers
from tests.packings import narrowed
from tests.reference import Past, Reference, Row
from vericache.demo import model
from vericache.demo.prompts import PROMPTS, load

WIDTHS = (2, 3, 4)
PAIRS: tuple[Pair, ...] = tuple((keys, values) for keys, values in itertools.product(WIDTHS, repeat=2))
CONTEXT, ASKED = 1024, 64  # tokens of a prompt that are computed, and the last ones, whose attention is looked at

Errors = list[dict[Pair, float]]  # of each layer


class Compared(Row):
    """A row behind ``past`` whose attention is compared with that over ``narrow``, the same KV by width."""

    def __init__(self, ids: Sequence[int], past: Past, narrow: Mapping[int, Past]) -> None:
        super().__init__(ids, past.length, [past])
        self.errors: Errors = []
        self._narrow = narrow

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        exact, errors = super().attend(layer, query, key, value, scale), {}
        for keys, values in PAIRS:
            past = Past(self._narrow[keys].keys, self._narrow[values].values)
            lossy = Row(self.ids, self.start, [past]).attend(layer, query, key, value, scale)
            errors[keys, values] = float(((lossy - exact).norm(dim=-1) / exact.norm(dim=-1)).mean())
        self.errors.append(errors)
        return exact


def layer_errors(reference: Reference, prompts: Iterable[Sequence[int]]) -> Errors:
    """Mean over ``prompts``, token ids of more than ``ASKED`` tokens each; of long ones the end."""
    found = []
    for ids in prompts:
        past = reference.full(ids[-CONTEXT:-ASKED])
        row = Compared(ids[-ASKED:], past, {width: narrower(past, width) for width in WIDTHS})
        reference.forward([row])
        found.append(row.errors)
    return [{p: sum(e[p] for e in layer) / len(layer) for p in PAIRS} for layer in zip(*found, strict=True)]


def narrower(past: Past, width: int) -> Past:
    def narrow(x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        return narrowed(rows, torch.full((len(rows),), width)).view_as(x)

    return Past(*([narrow(x) for x in side] for side in (past.keys, past.values)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mean-bits", type=float, default=3.0, help="of a number, over layers, keys and values")
    parser.add_argument("--model", type=Path, help="a model folder instead of the bundled model")
    parser.add_argument("--prompts", nargs="+", choices=PROMPTS, default=list(PROMPTS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a YAML file (default: standard output)")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    folder = args.model or model.prepare()
    with Console(stderr=True).status("attention over narrower KV"):
        prompts = load(args.prompts, AutoTokenizer.from_pretrained(folder)).values()
        errors = layer_errors(Reference(folder), prompts)
    try:
        bits = bits_of_layers(errors, args.mean_bits)
    except ValueError as error:
        parser.error(str(error))
    settings = {"page_format": "turboquant_mixed", "layer_bits": [list(pair) for pair in bits]}
    text = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=100)
    if args.out is None:
        print(text, end="")
    else:
        args.out.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
