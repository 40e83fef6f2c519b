"""What training and measuring a surrogate print, and write as JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vericache.surrogate.metrics import Agreement
from vericache.surrogate.texts import Text


def report(agreement: Agreement, held_out: Sequence[Text], **about: Any) -> dict[str, Any]:
    """JSON types only: figures per layer, their mean, and the overlap under one threshold for all layers and heads.
    Without texts held out there are no figures."""
    about |= {"held_out": [{"name": t.name, "tokens": t.tokens} for t in held_out], "scored_tokens": agreement.tokens}
    if not held_out:
        return about
    rows = agreement.layers()
    mean = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
    return {
        **about,
        "layers": [_rounded(row) for row in rows],
        "mean": _rounded(mean),
        "one_threshold": _rounded(agreement.pooled()),
    }


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in figures.items()}


def show(found: Mapping[str, Any], console: Console) -> None:
    if not found["held_out"]:
        console.print("not measured: no text is held out")
        return
    title = f"{len(found['held_out'])} texts held out, {found['scored_tokens']} tokens, against KVzip's scores"
    table = Table("layer", *found["mean"], title=title, title_justify="left")
    lines = [*((str(i), row) for i, row in enumerate(found["layers"])), ("mean", found["mean"])]
    for label, row in [*lines, ("one threshold", found["one_threshold"])]:
        table.add_row(label, *(f"{row[name]:.3f}" if name in row else "" for name in found["mean"]))
    console.print(table)


def write(found: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
