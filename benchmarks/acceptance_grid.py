"""What ``benchmarks.acceptance`` measures, and the file it is kept in."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compressors import METHODS
from vericache.config import VeriCacheConfig

OWN = "own"  # counts: as the method spreads tokens by itself


@dataclass(frozen=True)
class Method:
    """A compressor, how it spreads tokens, and further settings: one line of the tables."""

    compressor: str
    counts: str
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return " ".join([self.compressor, self.counts, *(f"{k}={v}" for k, v in self.settings)]).strip()

    @property
    def arguments(self) -> dict[str, Any]:
        """As ``VeriCacheConfig`` takes them; what is no setting is an option of the compressor."""
        known = {k: v for k, v in self.settings if k in VeriCacheConfig.model_fields}
        options = {k: v for k, v in self.settings if k not in known}
        return {"compressor": self.compressor, "counts": self.counts, "compressor_options": options, **known}

    @classmethod
    def parse(cls, text: str) -> "Method":
        """``COMPRESSOR[:COUNTS[:SETTING=VALUE,...]]``, for example ``kvzip:per_head:selector=poisson``.

        Raises:
            ValueError: an unknown compressor, a setting without a value, or one that has no say in what is kept.
        """
        compressor, _, rest = text.partition(":")
        counts, _, settings = rest.partition(":")
        if compressor not in METHODS:
            raise ValueError(f"unknown compressor {compressor!r}, expected one of {', '.join(METHODS)}")
        pairs = [tuple(s.split("=", 1)) for s in settings.split(",") if s]
        if any(len(pair) != 2 for pair in pairs):
            raise ValueError(f"settings {settings!r}, expected SETTING=VALUE,...")
        method = cls(compressor, counts or METHODS[compressor].default_counts, tuple((k, _value(v)) for k, v in pairs))
        for i, (name, value) in enumerate(method.settings):
            others = replace(method, settings=(*method.settings[:i], *method.settings[i + 1 :]))
            if VeriCacheConfig(**method.arguments).method == VeriCacheConfig(**others.arguments).method:
                raise ValueError(f"{name}={value} changes nothing of what is kept, expected a setting that does")
        return method


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


FULL = Method("full KV", "")  # keeps everything: what is rejected then is rounding


def registered(counts: Sequence[str]) -> list[Method]:
    """Every registered compressor that needs no training, in the count modes asked for that it has."""
    methods = {name: m for name, m in METHODS.items() if m.network is None}
    modes = {name: [m.default_counts if c == OWN else c for c in counts] for name, m in methods.items()}
    return [
        Method(name, c) for name, wanted in modes.items() for c in dict.fromkeys(wanted) if c in METHODS[name].counts
    ]


@dataclass(frozen=True)
class Cell:
    method: Method
    ratio: float
    temperature: float

    @property
    def key(self) -> str:
        return f"{self.method.name} {self.ratio} {self.temperature}"


def grid(methods: Sequence[Method], ratios: Sequence[float], temperatures: Sequence[float]) -> list[Cell]:
    """Full KV first, then ratio after ratio, so that an unfinished grid has all methods at its first ratios."""
    floor = [Cell(FULL, 1.0, t) for t in temperatures]
    return floor + [Cell(m, r, t) for r in ratios for m in methods for t in temperatures]


class Results:
    """The JSON of a grid, one line per cell, rewritten whole after every cell."""

    def __init__(self, file: Path, header: Mapping[str, Any], keep: bool) -> None:
        """``keep``: go on with what is in the file. Raises ValueError when that was measured in another way."""
        self.file, self.header = file, dict(header)
        self.cells: dict[str, dict[str, Any]] = {}
        self.checks: dict[str, dict[str, Any]] = {}
        self._by_engine: dict[str, dict[str, Any]] = {}  # of merged results, cells that an engine measured
        if not keep or not file.exists():
            return
        found = json.loads(file.read_text())
        if found.get("options") != self.header["options"]:
            raise ValueError(
                f"{file} was measured with {found.get('options')}, expected {self.header['options']}; leave out --add "
                "to start anew, or give another --out"
            )
        self.header = {k: v for k, v in found.items() if k not in ("cells", "checks")} | self.header
        self.cells = {cell["key"]: cell for cell in found["cells"]}
        self.checks = {check["key"]: check for check in found["checks"]}

    def add(self, other: Mapping[str, Any]) -> None:
        """The result of another run: its cells replace those that are here, and what an engine measured of them stays
        beside it. Raises ValueError when it was measured in another way."""
        for name in ("options", "prompts", "model"):
            if other[name] != self.header.setdefault(name, other[name]):
                raise ValueError(f"runs with different {name} cannot be merged: {self.header[name]} and {other[name]}")
        side = {k: v for k, v in other.items() if k not in ("cells", "checks", "options", "prompts", "model")}
        by_engine = other.get("engine", True)
        if by_engine:
            self.header["in_engine"] = side
            self._by_engine |= {cell["key"]: cell for cell in other["cells"]}
        self.header |= {**side, "outputs": {**self.header.get("outputs", {}), **other["outputs"]}}
        for cell in other["cells"]:
            engine = None if by_engine else self._by_engine.get(cell["key"])
            self.cells[cell["key"]] = cell if engine is None else {**cell, "in_engine": engine}
        self.checks |= {check["key"]: check for check in other["checks"]}

    def content(self) -> dict[str, Any]:
        return {**self.header, "checks": list(self.checks.values()), "cells": list(self.cells.values())}

    def save(self, header: Mapping[str, Any]) -> None:
        """With what a run knows of all its cells. Never half a file."""
        outputs = {**self.header.get("outputs", {}), **header.get("outputs", {})}
        self.header |= {**header, "outputs": outputs}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in self.header.items()]
        for name, entries in (("checks", self.checks), ("cells", self.cells)):
            lines.append(f'"{name}": [\n' + ",\n".join(json.dumps(e) for e in entries.values()) + "\n]")
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        os.replace(temporary, self.file)

    def missing(self, cells: Sequence[Cell]) -> Iterator[tuple[Method, float, list[float]]]:
        """(method, ratio, temperatures) whose cells are not there yet."""
        wanted: dict[tuple[Method, float], list[float]] = {}
        for cell in cells:
            if cell.key not in self.cells:
                wanted.setdefault((cell.method, cell.ratio), []).append(cell.temperature)
        return ((method, ratio, temperatures) for (method, ratio), temperatures in wanted.items())
