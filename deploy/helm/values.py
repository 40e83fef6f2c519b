"""What the chart takes: every value with its type, its default and what it means.

``python -m deploy.helm`` writes the chart's ``values.yaml`` and ``values.schema.json`` from this, so that the two, and
VeriCache's own settings in them, cannot drift. Names are as Kubernetes spells them, but for the settings of VeriCache.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from vericache.config import VeriCacheConfig

KUBERNETES = "x-kubernetes"  # a definition of Kubernetes' own schema, put in by ``schema.py``


def _kubernetes(name: str) -> WithJsonSchema:
    return WithJsonSchema({KUBERNETES: f"io.k8s.api.{name}"})


Affinity = Annotated[dict[str, Any], _kubernetes("core.v1.Affinity")]
ContainerSecurity = Annotated[dict[str, Any], _kubernetes("core.v1.SecurityContext")]
EnvVar = Annotated[dict[str, Any], _kubernetes("core.v1.EnvVar")]
HPABehavior = Annotated[dict[str, Any], _kubernetes("autoscaling.v2.HorizontalPodAutoscalerBehavior")]
HPAMetric = Annotated[dict[str, Any], _kubernetes("autoscaling.v2.MetricSpec")]
EgressRule = Annotated[dict[str, Any], _kubernetes("networking.v1.NetworkPolicyEgressRule")]
Peer = Annotated[dict[str, Any], _kubernetes("networking.v1.NetworkPolicyPeer")]
PodSecurity = Annotated[dict[str, Any], _kubernetes("core.v1.PodSecurityContext")]
Resources = Annotated[dict[str, Any], _kubernetes("core.v1.ResourceRequirements")]
Spread = Annotated[dict[str, Any], _kubernetes("core.v1.TopologySpreadConstraint")]
Toleration = Annotated[dict[str, Any], _kubernetes("core.v1.Toleration")]
Volume = Annotated[dict[str, Any], _kubernetes("core.v1.Volume")]
VolumeMount = Annotated[dict[str, Any], _kubernetes("core.v1.VolumeMount")]

Name = Annotated[str, Field(max_length=53, pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$")]
Labels = dict[str, str]
Seconds = Annotated[int, Field(ge=0)]


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Image(Closed):
    repository: str = Field("vericache", min_length=1, description="where the image is")
    tag: str = Field("", description="empty: the chart's appVersion, a dash, and the device")
    digest: str = Field(
        "", pattern=r"^(sha256:[0-9a-f]{64})?$", description="sha256:...; pins the image whatever its tag says"
    )
    pullPolicy: Literal["IfNotPresent", "Always", "Never"] = Field("IfNotPresent", description="when to pull")
    pullSecrets: list[str] = Field([], description="names of pull secrets in the namespace")


class SecretKey(Closed):
    name: str = Field("", description="name of the Secret; empty: none is used")
    key: str = Field(..., min_length=1, description="key in it")


class Server(Closed):
    model: str = Field(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        min_length=1,
        description="model name on the hub, or its path in a volume; full attention only, see docs/gpu.md",
    )
    revision: str = Field("", description="branch, tag or commit of the model; pin it in production")
    servedModelName: str = Field("", description="name clients use and metrics carry; empty: the model's")
    maxModelLen: int | None = Field(
        None, ge=1, description="longest context in tokens; the host memory must hold one such request"
    )
    maxNumSeqs: int | None = Field(None, ge=2, description="most requests in a batch")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field("auto", description="of weights and activations")
    tensorParallelSize: int = Field(1, ge=1, description="GPUs a model is spread over; needs as many in gpu.count")
    gpuMemoryUtilization: float = Field(0.9, gt=0, le=1, description="share of device memory for vLLM; GPU only")
    kvCacheMemoryGib: float | None = Field(
        None, gt=0, description="memory for KV on the device, draft arena included, in GiB; null: what is left"
    )
    shutdownTimeoutSeconds: Seconds = Field(
        120, description="after SIGTERM: how long running requests may take to finish"
    )
    logLevel: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="of vLLM and VeriCache")
    apiKeySecret: SecretKey = Field(
        SecretKey(key="api-key"), description="API key of clients; without one everybody who reaches the port may ask"
    )
    hubTokenSecret: SecretKey = Field(SecretKey(key="token"), description="access token for gated models on the hub")
    extraArgs: list[str] = Field([], description="further flags of `vllm serve`, one word per item")
    extraEnv: list[EnvVar] = Field([], description="further variables; secrets by valueFrom only")


class GPU(Closed):
    count: int = Field(1, ge=0, description="GPUs of a pod; 0 with device cpu")
    resourceName: str = Field("nvidia.com/gpu", min_length=1, description="what the device plugin calls them")


class Memory(Closed):
    headroomGib: float = Field(
        8.0, ge=0, description="host memory of a pod beside the full KV and shared memory: processes, libraries"
    )
    sharedGib: float = Field(
        1.0, ge=0, description="/dev/shm, which counts as memory of the pod; tensor parallelism needs it"
    )
    memlockGib: float | None = Field(
        None,
        gt=0,
        description="memory that nodes let a process lock (ulimit -l), in GiB, when they limit it; null: they do not",
    )


class Persistence(Closed):
    enabled: bool = Field(False, description="false: models are downloaded anew by every pod")
    existingClaim: str = Field("", description="a claim of your own instead of a new one")
    storageClass: str | None = Field(None, description="null: the cluster's default; empty: none")
    accessMode: Literal["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"] = Field(
        "ReadWriteOnce", description="of the claim, also of an existing one: more than one pod needs ...Many"
    )
    size: str = Field("100Gi", pattern=r"^[0-9]+(\.[0-9]+)?[KMGTPE]i?$", description="of a new claim")
    mountPath: str = Field("/models", pattern="^/.+", description="where it is mounted; the hub's cache is in it")
    keep: bool = Field(True, description="keep the claim when the release is uninstalled")


class Probe(Closed):
    path: str = Field(..., pattern="^/", description="what is asked")
    initialDelaySeconds: Seconds = Field(0, description="before the first try")
    periodSeconds: int = Field(10, ge=1, description="between two tries")
    timeoutSeconds: int = Field(5, ge=1, description="of one try")
    successThreshold: int = Field(1, ge=1, description="tries in a row that must succeed; 1 but for readiness")
    failureThreshold: int = Field(3, ge=1, description="tries in a row that must fail")
    terminationGracePeriodSeconds: int | None = Field(None, ge=1, description="null: the pod's; not for readiness")


class Probes(Closed):
    startup: Probe = Field(
        Probe(path="/health", failureThreshold=180),
        description="time to download and load the model: periodSeconds x failureThreshold, here half an hour",
    )
    liveness: Probe = Field(Probe(path="/live"), description="the process answers, also while it drains")
    readiness: Probe = Field(
        Probe(path="/health", periodSeconds=5, failureThreshold=2),
        description="the engine can run a step, and the server does not drain",
    )


class Service(Closed):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field("ClusterIP", description="of the Service")
    port: int = Field(8000, ge=1, le=65535, description="port of the Service")
    annotations: Labels = Field({}, description="of the Service")


class ServiceAccount(Closed):
    create: bool = Field(True, description="false: use an existing one")
    name: str = Field("", description="empty: the release's name, or `default` when none is created")
    annotations: Labels = Field({}, description="for example a cloud role that may read the models")


class HPA(Closed):
    enabled: bool = Field(False, description="a HorizontalPodAutoscaler; not together with keda")
    minReplicas: int = Field(1, ge=1, description="fewest pods")
    maxReplicas: int = Field(4, ge=1, description="most pods")
    metrics: list[HPAMetric] = Field(
        [
            {
                "type": "Pods",
                "pods": {
                    "metric": {"name": "vllm_num_requests_waiting"},
                    "target": {"type": "AverageValue", "averageValue": "2"},
                },
            }
        ],
        min_length=1,
        description="what it scales on; the default needs an adapter that serves vllm:num_requests_waiting under the "
        "name given here",
    )
    behavior: HPABehavior = Field(
        {"scaleDown": {"stabilizationWindowSeconds": 600}}, description="a model takes minutes to load"
    )


class Keda(Closed):
    enabled: bool = Field(False, description="a KEDA ScaledObject; not together with hpa")
    minReplicas: int = Field(1, ge=1, description="fewest pods; with none nobody would say that requests wait")
    maxReplicas: int = Field(4, ge=1, description="most pods")
    pollingIntervalSeconds: int = Field(15, ge=1, description="between two looks")
    prometheusAddress: str = Field(
        "http://prometheus-operated.monitoring:9090",
        pattern="^https?://",
        description="Prometheus that scrapes the pods",
    )
    waitingPerPod: int = Field(2, ge=1, description="waiting requests per pod above which pods are added")


class Autoscaling(Closed):
    hpa: HPA = Field(HPA(), description="scale with Kubernetes' own autoscaler")
    keda: Keda = Field(Keda(), description="scale with KEDA on Prometheus")


class DisruptionBudget(Closed):
    enabled: bool = Field(True, description="limit how many pods a node drain takes at a time")
    maxUnavailable: int = Field(1, ge=1, description="pods")


class NetworkPolicy(Closed):
    enabled: bool = Field(True, description="limit who may connect to and from the pods")
    ingressFrom: list[Peer] = Field(
        [{"podSelector": {}}], description="who may reach the HTTP port; default: the release's namespace"
    )
    monitoringFrom: list[Peer] = Field(
        [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        description="Prometheus' pods; it is the same port",
    )
    egress: list[EgressRule] = Field(
        [
            {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]},
            {"ports": [{"port": 443, "protocol": "TCP"}]},
        ],
        description="where pods may connect to; default: names, and the hub over HTTPS. Empty: nowhere",
    )


class Monitor(Closed):
    enabled: bool = Field(False, description="needs the Prometheus operator")
    interval: str = Field("15s", pattern="^[0-9]+(ms|s|m)$", description="between two scrapes")
    scrapeTimeout: str = Field("10s", pattern="^[0-9]+(ms|s|m)$", description="of one scrape")
    labels: Labels = Field({}, description="labels the operator selects by")


class Rules(Closed):
    enabled: bool = Field(
        False, description="recording rules and alerts as a PrometheusRule; one release per Prometheus is enough"
    )
    labels: Labels = Field({}, description="labels the operator selects by")


class Dashboards(Closed):
    enabled: bool = Field(False, description="dashboards as ConfigMaps; one release per Grafana is enough")
    labels: Labels = Field({"grafana_dashboard": "1"}, description="labels Grafana's sidecar selects by")
    annotations: Labels = Field({}, description="for example the sidecar's folder")


class Monitoring(Closed):
    serviceMonitor: Monitor = Field(Monitor(), description="scrape through the Service")
    podMonitor: Monitor = Field(Monitor(), description="scrape the pods; not together with serviceMonitor")
    prometheusRule: Rules = Field(Rules(), description="see docs/operations.md for what each alert means")
    dashboards: Dashboards = Field(Dashboards(), description="acceptance, host link, latency, audit")


class Strategy(Closed):
    maxSurge: int = Field(
        1, ge=0, description="pods beside the wanted ones during an upgrade; each needs GPUs of its own"
    )
    maxUnavailable: int = Field(0, ge=0, description="pods that may be missing during an upgrade")


class Values(Closed):
    """Values of the VeriCache chart."""

    nameOverride: Name = Field("", description="instead of the chart's name; cannot change in an upgrade")
    fullnameOverride: Name = Field("", description="instead of release and chart name")
    commonLabels: Labels = Field({}, description="on every object")
    replicas: int = Field(1, ge=0, description="pods, unless an autoscaler decides")
    strategy: Strategy = Field(Strategy(), description="how an upgrade replaces pods")
    device: Literal["cuda", "cpu"] = Field("cuda", description="cpu is for trying things out")
    image: Image = Field(Image(), description="built from deploy/docker")
    server: Server = Field(Server(), description="the OpenAI server")
    vericache: VeriCacheConfig = Field(
        VeriCacheConfig(), description="settings of VeriCache, named as in `vericache settings`"
    )
    gpu: GPU = Field(GPU(), description="GPUs")
    memory: Memory = Field(Memory(), description="host memory beside vericache.host_memory_gib")
    resources: Resources = Field(
        {"requests": {"cpu": "4", "memory": "16Gi"}, "limits": {"memory": "16Gi"}},
        description="CPU and memory; GPUs come from gpu.count. Memory must hold the host KV, see docs/operations.md",
    )
    persistence: Persistence = Field(Persistence(), description="a volume for models")
    probes: Probes = Field(Probes(), description="Kubernetes' probes of the server")
    preStopSleepSeconds: Seconds = Field(5, description="before SIGTERM: time for load balancers to look elsewhere")
    terminationGracePeriodSeconds: int | None = Field(
        None, ge=1, description="null: preStopSleepSeconds + server.shutdownTimeoutSeconds + 30"
    )
    service: Service = Field(Service(), description="the Service")
    serviceAccount: ServiceAccount = Field(ServiceAccount(), description="pods use no token of it")
    autoscaling: Autoscaling = Field(Autoscaling(), description="at most one of the two")
    podDisruptionBudget: DisruptionBudget = Field(DisruptionBudget(), description="for node drains")
    networkPolicy: NetworkPolicy = Field(NetworkPolicy(), description="for clusters that enforce them")
    monitoring: Monitoring = Field(Monitoring(), description="Prometheus and Grafana")
    podAnnotations: Labels = Field({}, description="on pods")
    podLabels: Labels = Field({}, description="on pods; not the selectors' own")
    podSecurityContext: PodSecurity = Field(
        {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "fsGroup": 1000,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        description="of the pod",
    )
    containerSecurityContext: ContainerSecurity = Field(
        {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}},
        description="of the container; add capability IPC_LOCK where nodes limit locked memory",
    )
    runtimeClassName: str = Field("", description="for example nvidia")
    priorityClassName: str = Field("", description="of the pods")
    nodeSelector: Labels = Field({}, description="labels of nodes to run on")
    tolerations: list[Toleration] = Field([], description="taints of nodes to run on nevertheless")
    affinity: Affinity = Field({}, description="node and pod affinity")
    topologySpreadConstraints: list[Spread] = Field([], description="how pods spread")
    extraVolumes: list[Volume] = Field([], description="further volumes, for example with a surrogate's file")
    extraVolumeMounts: list[VolumeMount] = Field([], description="where they are mounted")
