"""What ``benchmarks.acceptance`` measures, keeps and shows."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.acceptance import arguments, merged
from benchmarks.acceptance_engine import distinct_4_grams
from benchmarks.acceptance_grid import FULL, Cell, Method, Results, grid, registered
from benchmarks.acceptance_report import Report, collapse, shown, summed
from compressors import METHODS

OPTIONS = {"tokens": 64, "drafts": [8, 25], "prompts": ["a", "b"]}
HEADER: dict[str, Any] = {"date": "2026-01-01", "machine": "m", "model": "tiny", "options": OPTIONS}
RUN: dict[str, Any] = {"prompts": {"a": 100, "b": 200}, "prefill_ms": 50.0, "outputs": {"0.0": {"a": 0.9, "b": 0.1}}}

UNTRAINED = {m.name for m in METHODS.values() if m.network is None}


def cell(method: Method, ratio: float, accepted: int, temperature: float = 0.0) -> dict[str, Any]:
    """Two rounds of the prompt "a", and perfect ones of "b", whose output loops."""
    rounds = {"a": {"8": [2, 10], "25": [2, 2 * accepted]}, "b": {"8": [9, 72], "25": [3, 75]}}
    return {"key": Cell(method, ratio, temperature).key, "method": method.name, "ratio": ratio,
            "temperature": temperature, "kept": ratio, "scoring_ms": 10.0, "rounds": rounds}  # fmt: skip


def results(file: Path, keep: bool = False, **header: Any) -> Results:
    return Results(file, HEADER | header, keep)


@pytest.fixture
def report(tmp_path: Path) -> Report:
    found, kvzip, other = results(tmp_path / "x.json"), Method.parse("kvzip"), Method.parse("random:uniform")
    cells = [cell(FULL, 1.0, 25), *(cell(kvzip, r, a) for r, a in ((0.5, 24), (0.25, 20), (0.1, 11)))]
    cells += [cell(other, 0.5, 5), cell(other, 0.25, 3)]
    found.cells = {c["key"]: c for c in cells}
    found.cells["x"] = {"method": "snapkv uniform", "ratio": 0.1, "temperature": 0.0, "refused": "too small"}
    found.save(RUN)
    return Report(json.loads((tmp_path / "x.json").read_text()))


def test_every_registered_method_is_there() -> None:
    assert {m.compressor for m in registered(["own"])} == UNTRAINED
    assert all(m.counts == METHODS[m.compressor].default_counts for m in registered(["own"]))
    both = registered(["own", "uniform"])
    assert len(both) == len(set(both))
    assert all(m.counts in METHODS[m.compressor].counts for m in both)


def test_methods_are_spelled_with_their_settings() -> None:
    method = Method.parse("kvzip:per_layer:sinks=8,chunk=512")
    assert method.name == "kvzip per_layer sinks=8 chunk=512"
    assert method.arguments == {"compressor": "kvzip", "counts": "per_layer", "compressor_options": {"chunk": 512},
                                "sinks": 8}  # fmt: skip
    for wrong in ("kvzp", "kvzip:uniform:sinks", "kvzip:uniform:page_format=kivi4", "kvzip::sinks=8,window=30"):
        with pytest.raises(ValueError, match="expected"):
            Method.parse(wrong)


def test_the_quick_grid_and_what_is_given_beside_it() -> None:
    args = arguments(["--quick", "--ratios", "0.5"])
    assert (args.ratios, args.temperatures, len(args.prompts)) == ([0.5], [0.0], 2)
    assert args.minutes < 10
    assert {m.compressor for m in args.methods} == UNTRAINED
    assert arguments([]).drafts == [8, 16, 25, 40]


def test_a_grid_has_full_kv_once_per_temperature_and_all_methods_ratio_by_ratio() -> None:
    methods = registered(["own"])
    cells = grid(methods, [0.25, 0.1], [0.0, 1.0])
    assert len({c.key for c in cells}) == len(cells) == 2 + 4 * len(methods)
    assert [c.method for c in cells[:2]] == [FULL, FULL]
    assert {c.ratio for c in cells[2 : 2 + 2 * len(methods)]} == {0.25}


def test_a_file_is_gone_on_with(tmp_path: Path) -> None:
    file, kvzip = tmp_path / "x.json", Method.parse("kvzip")
    first = results(file)
    first.cells["kvzip per_head 0.25 0.0"] = cell(kvzip, 0.25, 20)
    first.checks["c"] = {"key": "c"}
    first.save(RUN)
    second = results(file, keep=True, date="2026-02-02")
    assert (second.cells, second.checks) == (first.cells, first.checks)
    wanted = grid([kvzip], [0.25], [0.0, 0.7])
    assert list(second.missing(wanted)) == [(FULL, 1.0, [0.0, 0.7]), (kvzip, 0.25, [0.7])]
    second.save({**RUN, "outputs": {"0.7": {"a": 0.8, "b": 0.8}}})
    content = json.loads(file.read_text())
    assert content == second.content()
    assert set(content["outputs"]) == {"0.0", "0.7"}
    assert content["date"] == "2026-02-02"
    assert results(file).cells == {}
    with pytest.raises(ValueError, match="leave out --add"):
        results(file, keep=True, options={**OPTIONS, "tokens": 65})


def test_only_outputs_that_do_not_loop_count(report: Report) -> None:
    assert report.accepted("kvzip per_head", 0.25, 0.0, 25) == 20
    assert report.accepted("kvzip per_head", 0.25, 0.0, 8) == 5
    assert report.accepted("kvzip per_head", 0.25, 0.7, 25) is None
    assert report.accepted("random uniform", 0.1, 0.0, 25) is None


def test_the_grid_table(report: Report) -> None:
    assert report.grid(0.0, 25) == [
        "| method | 0.5 | 0.25 | 0.1 |",
        "| :-- | --: | --: | --: |",
        "| full KV (noise floor) | 25.0 (100%) |  |  |",
        "| kvzip per_head | **24.0 (96%)** | **20.0 (80%)** | **11.0 (44%)** |",
        "| random uniform | 5.0 (20%) | 3.0 (12%) | - |",
    ]


def test_where_methods_collapse(report: Report) -> None:
    assert report.collapse(0.0, 25)[2:] == ["| kvzip per_head | 0.25 | 0.25 |", "| random uniform | 0.25 | - |"]
    assert collapse({0.5: 10.0, 0.25: 5.0}, 10.0) == 0.5
    assert collapse({0.5: 10.0, 0.25: 5.1}, 10.0) == 0.25
    assert collapse({}, None) is None


def test_the_page_says_what_was_left_out(report: Report, tmp_path: Path) -> None:
    report.write(tmp_path)
    text = (tmp_path / "acceptance.md").read_text()
    assert "- snapkv uniform, ratio 0.1: too small" in text
    assert "0.10 (loops)" in text
    assert "predicted, not run" in text
    assert "| kvzip per_head | 10 | 0.20 | 0.500 | 0.250 | 0.100 |" in text
    assert {f.name for f in tmp_path.glob("*.png")} == {"acceptance.png", "acceptance-map.png"}


def test_numbers() -> None:
    assert summed({8: [3, 8], 25: []}) == {"8": [2, 11], "25": [0, 0]}
    assert shown(None, 8) == "-"
    assert shown(4.04, 8, best=True) == "**4.0 (50%)**"
    assert distinct_4_grams([1, 2, 3, 4, 1, 2, 3, 4]) == 4 / 5
    assert distinct_4_grams([1]) == 0


def test_parts_of_a_grid_are_all_of_it_and_share_no_compressor() -> None:
    every = arguments([]).methods
    parts = [arguments(["--part", f"{i}/3"]).methods for i in range(3)]
    assert sorted((m for part in parts for m in part), key=every.index) == every
    assert sum(len({m.compressor for m in part}) for part in parts) == len({m.compressor for m in every})
    with pytest.raises(SystemExit):
        arguments(["--part", "3/3"])


def test_merged_parts_keep_what_an_engine_measured_beside_theirs(tmp_path: Path) -> None:
    kvzip, other = Method.parse("kvzip"), Method.parse("random:uniform")
    files = [tmp_path / name for name in ("engine.json", "one.json", "two.json")]
    engine = results(files[0], machine="a CPU", engine=True)
    engine.cells = {c["key"]: c for c in (cell(FULL, 1.0, 25), cell(kvzip, 0.25, 20))}
    engine.save(RUN)
    for file, method in zip(files[1:], (kvzip, other), strict=True):
        part = results(file, machine="a GPU", engine=False)
        found = cell(method, 0.25, 18)
        del found["scoring_ms"]
        part.cells = {found["key"]: found}
        part.save({k: v for k, v in RUN.items() if k != "prefill_ms"})
    report = merged(files, tmp_path)
    assert report.accepted("kvzip per_head", 0.25, 0.0, 25) == 18
    text = report.markdown()
    assert "a GPU" in text.splitlines()[2]
    assert "| kvzip per_head | 10 | 0.20 |" in text  # what scoring took in the engine
    assert "| 25 | 1 | 1 of 2 |" in text  # cells measured twice; prompts that agree
    assert "- | - |" in next(line for line in text.splitlines() if line.startswith("| random uniform | -"))
    found, content = Results(tmp_path / "x.json", {}, keep=False), json.loads(files[0].read_text())
    found.add(content)
    with pytest.raises(ValueError, match="different model"):
        found.add({**content, "model": "other"})


def test_what_a_run_without_an_engine_cannot_do_is_said_before_it_begins() -> None:
    for wrong in (["--device", "cpu", "--check", "kvzip"], ["--device", "cuda", "--quick"], ["--model", "x"]):
        with pytest.raises(SystemExit):
            arguments(wrong)
    assert arguments(["--device", "cpu", "--model", "x"]).model == Path("x")
