"""What the chart renders: valid for Kubernetes, whatever is switched on, named and labelled."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.helm import CHART
from tests.deploy.charting import EXAMPLES, Object, check_object, container, merged, one, rendered
from tests.deploy.features import FEATURES
from vericache.config import VeriCacheConfig, load

VERSIONS = ("1.27", "1.31", "1.37")  # Chart.yaml says from which on
EXCLUSIVE = (
    {"hpa", "keda"}, {"service_monitor", "pod_monitor"}, {"claim", "existing_claim", "one_node_claim"},
    {"one_node_claim", "hpa"}, {"one_node_claim", "keda"}, {"bare", "closed_network"}, {"claim", "server"},
)  # fmt: skip
PAIRS = [pair for pair in combinations(FEATURES, 2) if not any(len(each & set(pair)) == 2 for each in EXCLUSIVE)]
NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,51}[a-z0-9])?", fullmatch=True)


def documents(objects: list[Object]) -> None:
    identities = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(identities) == len(set(identities))
    assert {each["metadata"]["namespace"] for each in objects} == {"models"}


def pods_labels(objects: list[Object]) -> Object:
    labels: Object = one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    return labels


def selectors(objects: list[Object]) -> list[Object]:
    """Of everything that looks for pods, or, as a ServiceMonitor does, for the Service."""
    found = []
    for each in objects:
        spec = each.get("spec", {})
        if each["kind"] == "Service":
            found.append(spec["selector"])
        elif each["kind"] == "NetworkPolicy":
            found.append(spec["podSelector"]["matchLabels"])
        elif "selector" in spec:
            found.append(spec["selector"]["matchLabels"])
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("example", [None, *EXAMPLES], ids=lambda path: path.stem if path else "defaults")
def test_examples_are_valid(example: Path | None, version: str) -> None:
    objects = rendered(yaml.safe_load(example.read_text()) if example else {})
    documents(objects)
    for each in objects:
        check_object(each, version)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("version", VERSIONS)
def test_features_are_valid(feature: str, version: str) -> None:
    """Public fault 31: nothing is in the wrong place, of any feature."""
    objects = rendered(FEATURES[feature])
    documents(objects)
    for each in objects:
        check_object(each, version)


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_pairs_of_features_are_valid(pair: tuple[str, str]) -> None:
    """Public fault 31: what two of them write into the same object stays apart."""
    objects = rendered(merged(*(FEATURES[name] for name in pair)))
    documents(objects)
    check_object(one(objects, "Deployment"), VERSIONS[-1])
    for selector in selectors(objects):
        assert selector.items() <= pods_labels(objects).items()


@settings(max_examples=30)
@given(
    release=NAMES,
    name=st.just("") | NAMES,
    full=st.just("") | NAMES,
    label=st.dictionaries(st.sampled_from(["team", "tier", "app", "app.kubernetes.io/component"]), NAMES, max_size=3),
)
def test_selectors_match_under_any_name(release: str, name: str, full: str, label: dict[str, str]) -> None:
    """Public fault 31: pod labels hold what every selector asks for, and names are names."""
    everything = merged(
        *(FEATURES[n] for n in ("keda", "service_monitor", "rules", "dashboards", "claim")),
        {"nameOverride": name, "fullnameOverride": full, "commonLabels": label, "podLabels": label},
    )
    objects = rendered(everything, name=release)
    documents(objects)
    found = selectors(objects)
    assert len(found) == 5  # Deployment, Service, PodDisruptionBudget, NetworkPolicy, ServiceMonitor
    for selector in found:
        assert selector
        assert selector.items() <= pods_labels(objects).items()
    service = one(objects, "Service")["metadata"]["labels"]
    assert one(objects, "ServiceMonitor")["spec"]["selector"]["matchLabels"].items() <= service.items()
    for each in objects:
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", each["metadata"]["name"])
        assert each["kind"] != "Service" or len(each["metadata"]["name"]) <= 63
        assert all(len(value) <= 63 for value in each["metadata"]["labels"].values())
        assert each["metadata"]["labels"].items() >= label.items()
    target = one(objects, "ScaledObject")["spec"]["scaleTargetRef"]["name"]
    assert target == one(objects, "Deployment")["metadata"]["name"]


@settings(max_examples=30)
@given(
    path=st.from_regex(r"/[a-z]{1,8}", fullmatch=True),
    numbers=st.lists(st.integers(1, 100_000), min_size=5, max_size=5),
    which=st.sampled_from(["startup", "liveness", "readiness"]),
)
def test_every_probe_field_reaches_the_pod(path: str, numbers: list[int], which: str) -> None:
    """Public fault 30."""
    fields = ["failureThreshold", "periodSeconds", "timeoutSeconds", "initialDelaySeconds"]
    fields.append("successThreshold" if which == "readiness" else "terminationGracePeriodSeconds")
    asked: dict[str, Any] = dict(zip(fields, numbers, strict=True))
    probe = container(rendered({"probes": {which: {"path": path, **asked}}}))[f"{which}Probe"]
    assert probe.pop("httpGet") == {"path": path, "port": "http"}
    assert probe == {"successThreshold": 1, **asked}


def test_probes_of_the_schema_are_kubernetes_own() -> None:
    """Public fault 30: no field of a probe that users could miss here."""
    stated = json.loads((CHART / "values.schema.json").read_text())["definitions"]["Probe"]["properties"]
    assert set(stated) == {
        "path", "failureThreshold", "periodSeconds", "timeoutSeconds", "initialDelaySeconds", "successThreshold",
        "terminationGracePeriodSeconds",
    }  # fmt: skip


@pytest.mark.parametrize("scaler", ["hpa", "keda"])
def test_no_replicas_beside_an_autoscaler(scaler: str) -> None:
    """Every upgrade would undo what it decided."""
    assert "replicas" not in one(rendered(FEATURES[scaler]), "Deployment")["spec"]
    assert one(rendered({"replicas": 3}), "Deployment")["spec"]["replicas"] == 3


@pytest.mark.parametrize("feature", FEATURES)
def test_nothing_secret_in_plain_text(feature: str) -> None:
    """A token in plain env (production-stack #14, #22): by reference only, and never on the command line."""
    server = container(rendered(FEATURES[feature]))
    for variable in server["env"]:
        if re.search("(?i)key|token|secret|passw|credential", variable["name"]):
            assert variable.keys() == {"name", "valueFrom"}
            assert variable["valueFrom"].keys() == {"secretKeyRef"}
    assert not [word for word in server["args"] if re.search("(?i)api-key|token=|password", word)]


def test_secrets_are_where_the_server_reads_them() -> None:
    found = {each["name"]: each.get("valueFrom") for each in container(rendered(FEATURES["secrets"]))["env"]}
    assert found["VLLM_API_KEY"] == {"secretKeyRef": {"name": "keys", "key": "vericache"}}
    assert found["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}


@settings(max_examples=30)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "mode": st.sampled_from(["draft", "off"]),
            "bitwise": st.sampled_from(["off", "on"]),
            "shared_verifies": st.sampled_from(["off", "on"]),
            "reuse_scores": st.sampled_from(["off", "on"]),
            "residual_reload": st.sampled_from(["off", "on"]),
            "window": st.integers(27, 300),
            "compressor": st.sampled_from(["kvzip", "snapkv", "h2o"]),
            "selector_seed": st.integers(0, 2**32 - 1),
            "selector_floor": st.floats(1e-9, 1),
            "compressor_options": st.sampled_from([{}, {"chunk": 2048}]),
            "link_bytes_per_second": st.floats(1, 1e12),
            "iteration_seconds": st.floats(1e-9, 1),
            "request_options": st.just(["mode"]),
            "audit_share": st.floats(0, 1),
            "host_memory_gib": st.floats(0.01, 6),
        },
    )
)
def test_settings_reach_the_server(chosen: dict[str, Any]) -> None:
    """As the server reads them, whatever YAML makes of a number or of `off`."""
    if chosen.get("compressor", "kvzip") != "kvzip":
        chosen.pop("compressor_options", None)
    settings_file = one(rendered({"vericache": chosen}), "ConfigMap")["data"]["vericache.yaml"]
    assert VeriCacheConfig(**yaml.safe_load(settings_file)) == VeriCacheConfig(**chosen)


def test_the_server_reads_the_mounted_file_and_nothing_else(tmp_path: Path) -> None:
    """Kubernetes tells pods about Services in variables: those of one called "vericache" would be read as settings."""
    objects = rendered(name="vericache")
    pod = one(objects, "Deployment")["spec"]["template"]["spec"]
    assert one(objects, "Service")["metadata"]["name"] == "vericache"
    assert pod["enableServiceLinks"] is False
    server = container(objects)
    (flag,) = [word for word in server["args"] if word.startswith("--vericache-")]
    path = Path(flag.removeprefix("--vericache-config="))
    (mount,) = [m for m in server["volumeMounts"] if m["mountPath"] == str(path.parent)]
    (volume,) = [v for v in pod["volumes"] if v["name"] == mount["name"]]
    config = one(objects, "ConfigMap")
    assert volume["configMap"]["name"] == config["metadata"]["name"]
    (tmp_path / "settings").write_text(config["data"][path.name])
    assert load(env={}, file=tmp_path / "settings") == VeriCacheConfig()
    assert not [each for each in server["env"] if each["name"].startswith("VERICACHE_")]


def test_a_change_of_settings_replaces_the_pods() -> None:
    def checksum(values: Object) -> Any:
        return one(rendered(values), "Deployment")["spec"]["template"]["metadata"]["annotations"]["checksum/settings"]

    assert checksum({}) == checksum({"replicas": 2})
    assert checksum({}) != checksum({"vericache": {"ratio": 0.5}})


@pytest.mark.parametrize("feature", FEATURES)
def test_pods_may_write_where_they_must_and_nowhere_else(feature: str) -> None:
    objects = rendered(FEATURES[feature])
    pod, server = one(objects, "Deployment")["spec"]["template"]["spec"], container(objects)
    assert server["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    mounts = {each["mountPath"]: each for each in server["volumeMounts"]}
    assert {"/tmp", "/cache", "/etc/vericache"} <= set(mounts)
    assert {each["name"] for each in server["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    home = {each["name"]: each.get("value") for each in server["env"]}
    assert home["HOME"] in mounts
    assert any(home["HF_HOME"].startswith(path) for path in mounts)


def test_the_claim_is_mounted_as_asked() -> None:
    """A PVC with the wrong path or class (production-stack #148, #359)."""
    objects = rendered(FEATURES["claim"])
    claim = one(objects, "PersistentVolumeClaim")
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "500Gi"}},
    }
    volumes = one(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]
    (volume,) = [each for each in volumes if "persistentVolumeClaim" in each]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    shared = rendered(FEATURES["existing_claim"])
    assert not [each for each in shared if each["kind"] == "PersistentVolumeClaim"]
    (mount,) = [each for each in container(shared)["volumeMounts"] if each["name"] == "models"]
    assert mount == {"name": "models", "mountPath": "/models", "readOnly": True}
    for stated, expected in (({}, None), ({"storageClass": ""}, "")):
        spec = one(rendered(merged(FEATURES["one_node_claim"], {"persistence": stated})), "PersistentVolumeClaim")
        assert spec["spec"].get("storageClassName") == expected


def test_gpus_and_their_nodes() -> None:
    assert container(rendered())["resources"]["limits"]["nvidia.com/gpu"] == 1
    other = rendered({"gpu": {"resourceName": "nvidia.com/mig-3g.40gb"}, "resources": {"limits": None}})
    assert container(other)["resources"]["limits"] == {"nvidia.com/mig-3g.40gb": 1}
    cpu = rendered({"device": "cpu", "gpu": {"count": 0}})
    assert "gpu" not in json.dumps(container(cpu))
    assert container(cpu)["image"].endswith("-cpu")


def test_the_pod_lives_longer_than_the_drain() -> None:
    """vLLM #43208: preStop and --shutdown-timeout both count against the pod's grace period."""
    for seconds in (0, 30, 3600, 1_000_000):  # Helm would write 1e+06
        objects = rendered({"server": {"shutdownTimeoutSeconds": seconds}})
        grace = one(objects, "Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace == 5 + seconds + 30
        assert f"--shutdown-timeout={seconds}" in container(objects)["args"]


def test_monitoring_is_off_unless_asked_for() -> None:
    """Dashboards and rules of something that is not there (production-stack #987)."""
    kinds = {each["kind"] for each in rendered()}
    assert kinds == {
        "ConfigMap", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service", "ServiceAccount",
    }  # fmt: skip
