"""Engine tests come in groups, one folder each. A group has one engine for all its tests, and with pytest-xdist a
group stays in one process: ``full`` runs the bundled model, ``small`` and ``packed`` its first layers (a fifth of the
time), ``elastic`` a tiny one, ``commands`` starts processes of its own."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.engine.harness import ENGINE, SETTINGS, Harness
from vericache.demo import model, prompts
from vericache.demo.worker import Job, run_in_process

# Engine arguments of the groups that have an engine.
GROUPS: dict[str, dict[str, Any]] = {"full": {"max_model_len": 3072}, "small": {}, "packed": {}}
GROUPS["elastic"] = {"num_gpu_blocks_override": 41}  # four of its prompts with their output, and four to spare
PROMPT_TOKENS = 240
OUTPUT_TOKENS = 40
SMALL_LAYERS = 4


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.parent.name == "engine":
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.xdist_group(item.path.parent.name))


@pytest.fixture(scope="session")
def full_folder() -> Path:
    return model.prepare()


@pytest.fixture(scope="session")
def small_folder(full_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model cut to its first layers: other text, the same arithmetic."""
    folder = tmp_path_factory.mktemp("model")
    for file in full_folder.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    config = json.loads((full_folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": SMALL_LAYERS}))
    weights: dict[str, torch.Tensor] = {}
    for file in full_folder.glob("*.safetensors"):
        weights |= load_file(file)

    def in_first_layers(name: str) -> bool:
        _, found, rest = name.partition(".layers.")
        return not found or int(rest.partition(".")[0]) < SMALL_LAYERS

    kept = {n: t for n, t in weights.items() if in_first_layers(n)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def texts(full_folder: Path) -> dict[str, list[int]]:
    """The eight bundled prompts, cut short."""
    return prompts.load(list(prompts.PROMPTS), AutoTokenizer.from_pretrained(full_folder), PROMPT_TOKENS)


def stock_output(folder: Path, texts: dict[str, list[int]]) -> dict[str, list[int]]:
    """Greedy output of stock vLLM, from a process in which VeriCache's backend does not exist."""
    return run_in_process(Job(str(folder), texts, OUTPUT_TOKENS, ENGINE, ignore_eos=True)).tokens


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, full_folder: Path, small_folder: Path) -> Path:
    """The model of the test's group."""
    return full_folder if request.path.parent.name == "full" else small_folder


@pytest.fixture
def stock(
    request: pytest.FixtureRequest, folder: Path, texts: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[int]]:
    """Stock vLLM's greedy output for ``texts``, made once for all processes of a run."""
    group, base = request.path.parent.name, tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    shared = base / f"stock-{group if group in ('full', 'elastic') else 'small'}.json"
    with FileLock(f"{shared}.lock"):
        if not shared.exists():
            shared.write_text(json.dumps(stock_output(folder, texts)))
    return dict(json.loads(shared.read_text()))


class LiveGroup:
    """The engine of the group whose tests run now; another group's engine is shut down first."""

    def __init__(self) -> None:
        self.name = ""
        self.harness: Harness | None = None

    def engine(self, group: str, folder: Path, **settings: Any) -> Harness:
        """``settings`` that only a start can change."""
        name = f"{group} {settings}"
        if self.harness is None or self.name != name:
            self.close()
            self.name, self.harness = name, Harness(folder, {**ENGINE, **GROUPS[group]}, {**SETTINGS, **settings})
        return self.harness

    def close(self) -> None:
        harness, self.harness = self.harness, None
        if harness is not None:
            harness.close()


@pytest.fixture(scope="session")
def _live() -> Iterator[LiveGroup]:
    live = LiveGroup()
    yield live
    live.close()


@pytest.fixture
def engine(request: pytest.FixtureRequest, folder: Path, _live: LiveGroup) -> Iterator[Harness]:
    """The group's engine with default settings; after the test nothing may be held or left anywhere."""
    harness = _live.engine(request.path.parent.name, folder)
    harness.configure()
    yield harness
    harness.assert_at_rest()
