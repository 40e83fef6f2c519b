"""The chart, rendered: objects by kind, and what Kubernetes says about them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from helm_python.chart import Chart

from deploy.helm import CHART

EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
SCHEMAS = Path(__file__).parent / "schemas"  # of kinds that come with operators, the parts this chart uses
Object = dict[str, Any]


@cache
def chart() -> Chart:
    return Chart.load(CHART)


def merged(*values: Object) -> Object:
    """Later ones win, key by key, as with several ``-f``."""
    whole: Object = {}
    for each in values:
        for key, value in each.items():
            both = isinstance(value, dict) and isinstance(whole.get(key), dict)
            whole[key] = merged(whole[key], value) if both else value
    return whole


def rendered(values: Object | None = None, name: str = "demo", namespace: str = "models") -> list[Object]:
    manifests = chart().render(values or {}, name=name, namespace=namespace)
    texts = [text for path, text in manifests.items() if path.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each is not None]


def one(objects: list[Object], kind: str) -> Object:
    (found,) = [each for each in objects if each["kind"] == kind]
    return found


def container(objects: list[Object]) -> Object:
    (found,) = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    return found


def check_object(each: Object, version: str) -> None:
    """Raises ValidationError where Kubernetes, or the operator, would not take it or would ignore a field."""
    own = SCHEMAS / f"{each['kind']}.json"
    if own.exists():
        jsonschema.validate(each, json.loads(own.read_text()))
    else:
        kubernetes_validate.validate(each, version, strict=True)
