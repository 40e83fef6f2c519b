"""Writes ``values.yaml`` and ``values.schema.json`` of the chart from ``values.py``."""

import json
import textwrap
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import yaml
from pydantic import BaseModel

from deploy.helm import CHART
from deploy.helm.values import KUBERNETES, Values

DEFINITIONS = "kubernetes-json-schema/v1.37.0-local-strict/_definitions.json"  # in the package kubernetes_validate
HEADER = """\
# Values of the VeriCache chart, with their defaults. `values.schema.json` refuses everything else, at every level.
# Written by `python -m deploy.helm` from deploy/helm/values.py: change it there.
"""
EXPLAINING = ("description", "title", "default")  # of JSON schema: values.yaml says these


def schema() -> dict[str, Any]:
    """Closed JSON schema of the values, as Helm reads it (draft 7). Kubernetes' own types are taken from its schemas,
    strict ones, so that a misspelt toleration is refused like a misspelt value."""
    known = json.loads(files("kubernetes_validate").joinpath(DEFINITIONS).read_text(encoding="utf-8"))["$defs"]
    definitions: dict[str, Any] = {}

    def converted(node: Any, names: bool = False) -> Any:
        """``names``: the keys of ``node`` are names of properties."""
        if isinstance(node, list):
            return [converted(each) for each in node]
        if not isinstance(node, dict):
            return node
        if names:
            return {name: converted(each) for name, each in node.items()}
        if KUBERNETES in node or "$ref" in node:
            name = node.get(KUBERNETES) or node["$ref"].rpartition("/")[2]
            if name in known and name not in definitions:
                definitions[name] = None  # taken: some refer to themselves
                definitions[name] = converted(known[name])
            return {"$ref": f"#/definitions/{name}"}
        found = {k: converted(v, k == "properties") for k, v in node.items() if k not in EXPLAINING}
        if "prefixItems" in found:
            found["items"] = found.pop("prefixItems")  # its name before draft 2020-12
        return found

    whole = Values.model_json_schema(mode="serialization")
    for name, each in whole.pop("$defs").items():
        definitions[name] = _required(converted(each))
    root = _required(converted(whole))
    root["properties"]["global"] = {"type": "object"}  # Helm hands it to every subchart
    draft = {"$schema": "http://json-schema.org/draft-07/schema#"}
    return {**draft, **root, "definitions": dict(sorted(definitions.items()))}


def _required(model: dict[str, Any]) -> dict[str, Any]:
    """Every value has a default, so one is missing only where somebody took it away with a null."""
    nullable = {name for name, each in model["properties"].items() if {"type": "null"} in each.get("anyOf", ())}
    return {**model, "required": [name for name in model["properties"] if name not in nullable]}


def schema_json() -> str:
    """One property or definition a line."""
    text = []
    for key, value in schema().items():
        if isinstance(value, dict):
            rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in value.items())
            text.append(f" {json.dumps(key)}: {{\n{rows}\n }}")
        else:
            text.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(text) + "\n}\n"


def values_yaml() -> str:
    return HEADER + "".join(f"\n{block}\n" for block in blocks(Values()))


def blocks(model: BaseModel) -> Iterator[str]:
    """One value each: YAML, with comments on it and on what is in it."""
    for name, info in type(model).model_fields.items():
        value = getattr(model, name)
        comment = textwrap.fill(info.description or "", 100, initial_indent="# -- ", subsequent_indent="# ")
        if isinstance(value, BaseModel):
            inner = f"{name}:\n" + textwrap.indent("\n".join(blocks(value)), "  ")
        else:
            plain = model.model_dump(mode="json")[name]
            inner = yaml.safe_dump({name: plain}, sort_keys=False, width=100, default_flow_style=False).rstrip("\n")
        yield f"{comment}\n{inner}"


def main() -> None:
    (CHART / "values.yaml").write_text(values_yaml(), encoding="utf-8")
    (CHART / "values.schema.json").write_text(schema_json(), encoding="utf-8")


if __name__ == "__main__":
    main()
