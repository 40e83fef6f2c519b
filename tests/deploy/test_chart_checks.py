"""Mistakes that would cost an outage are stopped when the chart is rendered, and told what to change."""

import pytest
import yaml
from helm_python.errors import HelmRenderError
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.deploy.charting import EXAMPLES, Object, merged, rendered
from vericache.config import VeriCacheConfig

H100 = yaml.safe_load(next(path for path in EXAMPLES if path.stem == "values-h100").read_text())
CPU = yaml.safe_load(next(path for path in EXAMPLES if path.stem == "values-cpu").read_text())
# Values, words of the sentence, and what the sentence says to change, changed.
MISTAKES: dict[str, tuple[Object, list[str], Object]] = {
    "memory limit": (
        merged(H100, {"resources": {"limits": {"memory": "64Gi"}}}),
        ["resources.limits.memory is 64Gi", "vericache.host_memory_gib (160)", "at least 180Gi"],
        {"resources": {"limits": {"memory": "180Gi"}}},
    ),
    "memory request": (
        {"vericache": {"host_memory_gib": 32}, "resources": {"limits": {"memory": "1Ti"}}},
        ["resources.requests.memory is 16Gi", "at least 41Gi"],
        {"resources": {"requests": {"memory": "41Gi"}}},
    ),
    "memory of every rank": (
        {"server": {"tensorParallelSize": 2}, "gpu": {"count": 2}, "vericache": {"host_memory_gib": 6}},
        ["resources", "x server.tensorParallelSize (2)", "at least 21Gi"],
        {"resources": {"requests": {"memory": "21Gi"}, "limits": {"memory": "21Gi"}}},
    ),
    "memory on a CPU": (
        merged(CPU, {"server": {"kvCacheMemoryGib": 8}}),
        ["server.kvCacheMemoryGib (8), which on a CPU is host memory too", "at least 19Gi"],
        {"resources": {"requests": {"memory": "19Gi"}, "limits": {"memory": "19Gi"}}},
    ),
    "no memory at all": (
        {"resources": {"requests": None, "limits": None}},
        ["resources.requests.memory is not set", "at least 13Gi"],
        {"resources": {"requests": {"memory": "13Gi"}}},
    ),
    "not an amount": (
        {"resources": {"requests": {"memory": "lots"}}},
        ["no amount of memory", "64Gi"],
        {"resources": {"requests": {"memory": "64Gi"}}},
    ),
    "locked memory": (
        {"memory": {"memlockGib": 0.0625}},
        ["memory.memlockGib is 0.0625", "vericache.host_memory_gib (4)", "LimitMEMLOCK", "IPC_LOCK"],
        {"containerSecurityContext": {"capabilities": {"add": ["IPC_LOCK"]}}},
    ),
    "grace period": (
        {"server": {"shutdownTimeoutSeconds": 300}, "terminationGracePeriodSeconds": 60},
        ["terminationGracePeriodSeconds is 60", "preStopSleepSeconds (5)", "(300)", "at least 315"],
        {"terminationGracePeriodSeconds": 315},
    ),
    "two autoscalers": (
        {"autoscaling": {"hpa": {"enabled": True}, "keda": {"enabled": True}}},
        ["autoscaling.hpa and autoscaling.keda", "disable one"],
        {"autoscaling": {"hpa": {"enabled": False}}},
    ),
    "fewest above most": (
        {"autoscaling": {"hpa": {"enabled": True, "minReplicas": 9}}},
        ["autoscaling.hpa.minReplicas is 9", "maxReplicas (4)"],
        {"autoscaling": {"hpa": {"maxReplicas": 9}}},
    ),
    "two monitors": (
        {"monitoring": {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}}},
        ["serviceMonitor and monitoring.podMonitor", "twice"],
        {"monitoring": {"podMonitor": {"enabled": False}}},
    ),
    "ranks without GPUs": (
        {"server": {"tensorParallelSize": 2}},
        ["server.tensorParallelSize is 2, but gpu.count is 1"],
        {"gpu": {"count": 2}, "vericache": {"host_memory_gib": 3}},
    ),
    "GPUs without ranks": (
        {"gpu": {"count": 8}},
        ["server.tensorParallelSize is 1, but gpu.count is 8"],
        {"gpu": {"count": 1}},
    ),
    "GPUs on a CPU": ({"device": "cpu"}, ["device is cpu, but gpu.count is 1"], {"gpu": {"count": 0}}),
    "ranks without shared memory": (
        {"server": {"tensorParallelSize": 2}, "gpu": {"count": 2}, "memory": {"sharedGib": 0}},
        ["memory.sharedGib is 0", "/dev/shm"],
        {"memory": {"sharedGib": 1}, "resources": {"requests": {"memory": "20Gi"}, "limits": {"memory": "20Gi"}}},
    ),
    "GPUs named twice": (
        {"resources": {"limits": {"nvidia.com/gpu": 1}}},
        ["resources.limits names nvidia.com/gpu", "gpu.count"],
        {"resources": {"limits": {"nvidia.com/gpu": None}}},
    ),
    "one node's claim": (
        {"persistence": {"enabled": True}, "replicas": 3},
        ["persistence.accessMode is ReadWriteOnce", "4 pods", "ReadWriteMany"],
        {"persistence": {"accessMode": "ReadWriteMany"}},
    ),
    "one node's claim, scaled": (
        {
            "persistence": {"enabled": True},
            "strategy": {"maxSurge": 0, "maxUnavailable": 1},
            "autoscaling": {"keda": {"enabled": True}},
        },
        ["persistence.accessMode is ReadWriteOnce", "4 pods"],
        {"persistence": {"accessMode": "ReadWriteMany"}},
    ),
    "no way to upgrade": (
        {"strategy": {"maxSurge": 0}},
        ["strategy.maxSurge and strategy.maxUnavailable are both 0"],
        {"strategy": {"maxUnavailable": 1}},
    ),
    "audit into a read-only folder": (
        {"vericache": {"audit_folder": "/var/audit"}},
        ["vericache.audit_folder is /var/audit", "read-only"],
        {
            "extraVolumes": [{"name": "audit", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "audit", "mountPath": "/var/audit"}],
        },
    ),
    "selector label on pods": (
        {"podLabels": {"app.kubernetes.io/name": "other"}},
        ["podLabels sets app.kubernetes.io/name", "nameOverride"],
        {"podLabels": {"app.kubernetes.io/name": None}},
    ),
    "selector label everywhere": (
        {"commonLabels": {"app.kubernetes.io/instance": "other"}},
        ["commonLabels sets app.kubernetes.io/instance"],
        {"commonLabels": {"app.kubernetes.io/instance": None}},
    ),
    "a setting as an argument": (
        {"server": {"extraArgs": ["--vericache-draft-length=10"]}},
        ["server.extraArgs has --vericache-draft-length=10", "set vericache.draft_length instead"],
        {"server": {"extraArgs": []}},
    ),
    "an argument of the chart": (
        {"server": {"extraArgs": ["--tensor-parallel-size", "2"]}},
        ["--tensor-parallel-size", "set server.tensorParallelSize instead"],
        {"server": {"extraArgs": ["--seed", "2"]}},
    ),
    "the key as an argument": (
        {"server": {"extraArgs": ["--api-key=abc"]}},
        ["set server.apiKeySecret instead"],
        {"server": {"extraArgs": []}},
    ),
    "a setting as a variable": (
        {"server": {"extraEnv": [{"name": "VERICACHE_RATIO", "value": "0.5"}]}},
        ["server.extraEnv sets VERICACHE_RATIO", "set vericache.ratio instead"],
        {"server": {"extraEnv": []}},
    ),
    "a variable of the chart": (
        {"server": {"extraEnv": [{"name": "HOME", "value": "/root"}]}},
        ["server.extraEnv sets HOME, which the chart sets itself"],
        {"server": {"extraEnv": []}},
    ),
    "the key as a variable": (
        {"server": {"extraEnv": [{"name": "VLLM_API_KEY", "value": "abc"}]}},
        ["server.extraEnv sets VLLM_API_KEY", "server.apiKeySecret"],
        {"server": {"extraEnv": []}},
    ),
    "a secret in plain text": (
        {"server": {"extraEnv": [{"name": "AWS_SECRET_ACCESS_KEY", "value": "abc"}]}},
        ["AWS_SECRET_ACCESS_KEY in plain text", "valueFrom.secretKeyRef"],
        {"server": {"extraEnv": [
            {"name": "AWS_SECRET_ACCESS_KEY", "valueFrom": {"secretKeyRef": {"name": "aws", "key": "key"}}}
        ]}},
    ),
    "successes of a startup probe": (
        {"probes": {"startup": {"successThreshold": 2}}},
        ["probes.startup.successThreshold is 2"],
        {"probes": {"startup": {"successThreshold": 1}}},
    ),
    "grace of a readiness probe": (
        {"probes": {"readiness": {"terminationGracePeriodSeconds": 2}}},
        ["probes.readiness.terminationGracePeriodSeconds", "remove it"],
        {"probes": {"readiness": {"terminationGracePeriodSeconds": None}}},
    ),
}  # fmt: skip


def sentence(values: Object) -> str:
    with pytest.raises(HelmRenderError) as caught:
        rendered(values)
    return str(caught.value)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_stopped_and_what_it_says_helps(name: str) -> None:
    values, words, remedy = MISTAKES[name]
    said = sentence(values)
    assert [word for word in words if word not in said] == [], said
    assert rendered(corrected(values, remedy))


def corrected(values: Object, remedy: Object) -> Object:
    """Merged; None takes a key away."""
    both = {k: corrected(values.get(k) or {}, v) if isinstance(v, dict) else v for k, v in remedy.items()}
    return {key: value for key, value in {**values, **both}.items() if value is not None}


SETTINGS = {
    "draft_length": (40, "vericache.draft_length is 40, but a window of 30 iterations holds at most 28 drafts"),
    "verify_tokens": (20, "vericache.verify_tokens is 20, expected at least vericache.window (30)"),
    "ratio_limit": (0.1, "vericache.ratio_limit is 0.1, expected at least vericache.ratio (0.25)"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_contradict_each_other(name: str) -> None:
    """What the chart refuses, the server refuses."""
    value, said = SETTINGS[name]
    chosen = {"window": 30, name: value}
    assert said in sentence({"vericache": chosen})
    with pytest.raises(ValidationError):
        VeriCacheConfig(**chosen)


@settings(max_examples=40)
@given(
    st.fixed_dictionaries(
        {"window": st.integers(4, 60), "draft_length": st.integers(1, 60), "verify_tokens": st.integers(2, 80)},
        optional={"ratio_limit": st.floats(0.05, 1), "ratio": st.floats(0.1, 1)},
    )
)
def test_the_chart_refuses_nothing_that_the_server_takes(chosen: Object) -> None:
    try:
        VeriCacheConfig(**chosen)
    except ValidationError:
        with pytest.raises(HelmRenderError):
            rendered({"vericache": chosen})
    else:
        assert rendered({"vericache": chosen})


@settings(max_examples=40)
@given(
    st.sampled_from([("Gi", 2**30), ("G", 10**9), ("Mi", 2**20), ("Ti", 2**40), ("", 1), ("Ki", 2**10), ("k", 1000)]),
    st.floats(9.5, 16),
)
def test_any_unit_of_memory(unit: tuple[str, int], gib: float) -> None:
    """Needed are 4 GiB of full KV, 1 of shared memory, 8 of headroom."""
    suffix, size = unit
    amount = f"{gib * 2**30 / size:.9f}{suffix}"
    values = {"resources": {"requests": {"memory": amount}, "limits": {"memory": amount}}}
    if gib < 12.999:
        assert "resources." in sentence(values)
    elif gib > 13.001:
        assert rendered(values)


def test_less_locked_memory_will_do_without_a_gpu() -> None:
    assert rendered(merged(CPU, {"memory": {"memlockGib": 0.1}}))
    assert rendered({"memory": {"memlockGib": 4}})
