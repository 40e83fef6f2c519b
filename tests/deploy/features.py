"""Values that switch on what is off by default, one feature each; names are shown by pytest."""

from typing import Any

FEATURES: dict[str, dict[str, Any]] = {
    "hpa": {"autoscaling": {"hpa": {"enabled": True}}},
    "keda": {"autoscaling": {"keda": {"enabled": True}}},
    "service_monitor": {"monitoring": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}}},
    "pod_monitor": {"monitoring": {"podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}}},
    "rules": {"monitoring": {"prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}}}},
    "dashboards": {"monitoring": {"dashboards": {"enabled": True, "annotations": {"folder": "LLM"}}}},
    "claim": {
        "persistence": {"enabled": True, "accessMode": "ReadWriteMany", "storageClass": "fast", "size": "500Gi"},
        "server": {"model": "/models/8b"},
    },
    "existing_claim": {"persistence": {"enabled": True, "existingClaim": "shared", "accessMode": "ReadOnlyMany"}},
    "one_node_claim": {"persistence": {"enabled": True}, "strategy": {"maxSurge": 0, "maxUnavailable": 1}},
    "secrets": {
        "server": {
            "apiKeySecret": {"name": "keys", "key": "vericache"},
            "hubTokenSecret": {"name": "hub"},
            "extraEnv": [{"name": "OTHER_TOKEN", "valueFrom": {"secretKeyRef": {"name": "other", "key": "token"}}}],
        },
        "image": {"pullSecrets": ["registry"], "digest": "sha256:" + "0" * 64, "repository": "registry.example/vc"},
    },
    "placement": {
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
                }
            }
        },
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
        "runtimeClassName": "nvidia",
        "priorityClassName": "high",
    },
    "labels": {
        "commonLabels": {"team": "llm"},
        "podLabels": {"cost": "42"},
        "podAnnotations": {"note": "one"},
        "service": {"annotations": {"note": "two"}, "type": "LoadBalancer", "port": 80},
        "serviceAccount": {"annotations": {"role": "reader"}},
    },
    "volumes": {
        "extraVolumes": [{"name": "surrogate", "configMap": {"name": "surrogate"}}],
        "extraVolumeMounts": [{"name": "surrogate", "mountPath": "/surrogate", "readOnly": True}],
        "vericache": {"compressor": "kvzap", "surrogate": "/surrogate/file.safetensors"},
    },
    "audit": {"vericache": {"audit_share": 0.01, "audit_folder": "/cache/audit"}},
    "bare": {
        "memory": {"sharedGib": 0},
        "podDisruptionBudget": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "serviceAccount": {"create": False},
        "preStopSleepSeconds": 0,
        "resources": {"limits": None},
    },
    "closed_network": {"networkPolicy": {"ingressFrom": [], "monitoringFrom": [], "egress": []}},
    "server": {
        "server": {
            "revision": "main",
            "servedModelName": "a",
            "maxModelLen": 131072,
            "maxNumSeqs": 8,
            "kvCacheMemoryGib": 2.5,
            "shutdownTimeoutSeconds": 0,
            "extraArgs": ["--tool-call-parser", "hermes", "--enable-auto-tool-choice"],
            "extraEnv": [{"name": "OMP_NUM_THREADS", "value": "8"}],
        }
    },
}
