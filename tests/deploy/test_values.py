"""Nothing but what the chart knows gets into it: the values' schema, in the package too, and at every level."""

import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python.chart import Chart, lint, package
from helm_python.errors import HelmValuesError

from deploy.helm import CHART
from deploy.helm.__main__ import schema, schema_json, values_yaml
from deploy.helm.values import Values
from tests.deploy.charting import EXAMPLES, Object, chart, merged, rendered
from vericache.config import VeriCacheConfig

DEFAULTS: Object = yaml.safe_load((CHART / "values.yaml").read_text())


def mappings(values: Object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all mappings whose keys the chart defines."""
    yield path
    for key, value in values.items():
        if isinstance(value, dict) and value and key not in FREE:
            yield from mappings(value, (*path, key))


# Keys of these are the user's to choose: labels, amounts of whatever resource.
FREE = ("labels", "annotations", "requests", "limits", "matchLabels", "compressor_options")
PATHS = list(mappings(DEFAULTS))


def nested(path: tuple[str, ...], value: Any) -> Any:
    for key in reversed(path):
        value = {key: value}
    return value


def test_both_files_are_what_the_model_says() -> None:
    again = "; run `python -m deploy.helm`"
    assert (CHART / "values.yaml").read_text() == values_yaml(), "values.yaml is not current" + again
    assert (CHART / "values.schema.json").read_text() == schema_json(), "values.schema.json is not current" + again
    assert Values(**DEFAULTS) == Values()


def test_settings_are_those_of_the_server() -> None:
    """Also their defaults and ranges, so that neither can drift."""
    assert VeriCacheConfig(**DEFAULTS["vericache"]) == VeriCacheConfig()
    stated = json.loads((CHART / "values.schema.json").read_text())["definitions"]["VeriCacheConfig"]["properties"]
    assert list(stated) == list(VeriCacheConfig.model_fields)
    assert stated["draft_length"] == {"minimum": 1, "type": "integer"}
    assert stated["arena_fraction"]["anyOf"][1] == {"minimum": 0, "exclusiveMaximum": 1, "type": "number"}


def test_every_value_has_a_comment() -> None:
    assert all(info.description for model in _models() for info in model.model_fields.values())
    for path in PATHS:
        for key in _at(DEFAULTS, path) if _own(path) else ():
            indent = "  " * len(path)
            assert re.search(rf"^{indent}# .+\n{indent}{key}:", (CHART / "values.yaml").read_text(), re.MULTILINE), key


def _own(path: tuple[str, ...]) -> bool:
    """Not inside a value whose type is Kubernetes'."""
    model: Any = Values
    for key in path:
        model = model.model_fields[key].annotation
        if not hasattr(model, "model_fields"):
            return False
    return True


def _models() -> Iterator[Any]:
    seen, waiting = set(), [Values]
    while waiting:
        model = waiting.pop()
        if model in seen:
            continue
        seen.add(model)
        yield model
        waiting += [i.annotation for i in model.model_fields.values() if hasattr(i.annotation, "model_fields")]


def _at(values: Object, path: tuple[str, ...]) -> Object:
    for key in path:
        values = values[key]
    return values


def test_the_schema_is_closed_at_every_level() -> None:
    def walk(node: Any, where: str) -> None:
        if isinstance(node, dict):
            if "properties" in node and where != "":
                assert node.get("additionalProperties") is False, where
            for key, each in node.items():
                walk(each, f"{where}/{key}")
        elif isinstance(node, list):
            for i, each in enumerate(node):
                walk(each, f"{where}/{i}")

    whole = schema()
    assert whole["additionalProperties"] is False
    walk(whole, "")


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(path) or "root")
def test_a_misspelt_key_is_refused_and_named(path: tuple[str, ...]) -> None:
    """Public fault 34: by render and by lint, at every level."""
    wrong = nested(path, {"replicaCounts": 3})
    with pytest.raises(HelmValuesError, match="replicaCounts"):
        chart().render(wrong, name="demo")
    assert any("replicaCounts" in error for error in lint(CHART, wrong)["errors"])


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"replicas": "two"}, "/replicas"),
        ({"vericache": {"ratio": 1.5}}, "/vericache/ratio"),
        ({"vericache": {"mode": False}}, "/vericache/mode"),  # `mode: off`, unquoted
        ({"vericache": {"request_options": ["color"]}}, "/vericache/request_options/0"),
        ({"server": {"model": None}}, "model"),
        ({"server": {"extraArgs": "--seed 3"}}, "/server/extraArgs"),
        ({"nameOverride": "Not A Name"}, "/nameOverride"),
        ({"tolerations": [{"kye": "gpu"}]}, "kye"),
        ({"affinity": {"nodeAffinty": {}}}, "nodeAffinty"),
        ({"extraVolumes": [{"name": "a", "hostpath": {"path": "/"}}]}, "hostpath"),
        ({"server": {"extraEnv": [{"name": "A", "valueFrom": {"secretRef": {}}}]}}, "secretRef"),
        ({"persistence": {"storageclass": "fast"}}, "storageclass"),
        ({"image": {"digest": "latest"}}, "/image/digest"),
        ({"probes": {"startup": {"failureThreshold": "many"}}}, "/probes/startup/failureThreshold"),
        ({"servingEngineSpecc": {"x": 1}}, "servingEngineSpecc"),
    ],
    ids=lambda each: each if isinstance(each, str) else None,
)
def test_a_wrong_value_is_refused_and_named(wrong: Object, named: str) -> None:
    """Public fault 34: wrong types too, in VeriCache's settings and in what Kubernetes defines."""
    with pytest.raises(HelmValuesError, match=named):
        chart().render(wrong, name="demo")
    assert any(named in error for error in lint(CHART, wrong)["errors"])


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(package(CHART, destination=tmp_path_factory.mktemp("package")))


def test_the_package_carries_its_schema(archive: Path) -> None:
    """Public fault 34: a .helmignore must not drop it."""
    packaged = Chart.load(archive)
    assert packaged.schema == json.loads(schema_json())
    with pytest.raises(HelmValuesError, match="replicaCounts"):
        packaged.render({"replicaCounts": 3}, name="demo")


def test_the_package_is_whole(archive: Path) -> None:
    with tarfile.open(archive) as file:
        names = {name.removeprefix("vericache/") for name in file.getnames()}
        assert not any(member.issym() for member in file.getmembers())
    wanted = {str(path.relative_to(CHART)) for path in CHART.rglob("*") if path.is_file()}
    assert names == {name for name in wanted if not name.startswith("examples/")}


def test_as_a_subchart(tmp_path: Path, archive: Path) -> None:
    """Helm hands `global` to every subchart, which a closed schema must let through."""
    parent = tmp_path / "parent"
    (parent / "charts").mkdir(parents=True)
    (parent / "charts" / archive.name).write_bytes(archive.read_bytes())
    (parent / "Chart.yaml").write_text("apiVersion: v2\nname: parent\nversion: 1.0.0\n")
    values = {"global": {"region": "a"}, "vericache": {"replicas": 3}}
    (text,) = [t for n, t in Chart.load(parent).render(values, name="demo").items() if n.endswith("deployment.yaml")]
    assert yaml.safe_load(text)["spec"]["replicas"] == 3


@pytest.mark.parametrize("example", [None, *EXAMPLES], ids=lambda path: path.stem if path else "defaults")
def test_lint_finds_nothing(example: Path | None) -> None:
    values = yaml.safe_load(example.read_text()) if example else {}
    report = lint(CHART, values, strict=True)
    assert report["errors"] == []
    assert {m["error"] for m in report["messages"]} <= {"icon is recommended"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid_values(example: Path) -> None:
    values = yaml.safe_load(example.read_text())
    assert rendered(values)
    Values(**merged(DEFAULTS, values))
