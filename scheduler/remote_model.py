"""Remote prefix caching: GPUs far from the stored KV draft on its compressed form, GPUs beside it verify.

The paper's equation 4 and the share of both kinds of GPUs. Units and limits as in ``scheduler.byte_model``.
"""

from dataclasses import dataclass

from scheduler.byte_model import Load, Machine, Rounds


@dataclass(frozen=True)
class Remote:
    """``slow``: bytes per second into one remote GPU (BW_l); the machine's link is the fast one, into a verifying GPU
    (BW_h). ``output`` tokens per request (k); ``trip``: seconds for drafts to go and the verdict to come;
    ``local_share``: of the verifying GPUs' time that is for verifies (phi)."""

    slow: float
    output: int
    trip: float = 0.0
    local_share: float = 1.0

    def __post_init__(self) -> None:
        if self.slow <= 0 or self.output < 1 or self.trip < 0 or not 0 < self.local_share <= 1:
            raise ValueError(
                "expected a positive slow link, at least 1 output token, a trip of at least 0 s and a share in "
                f"(0, 1], got {self}"
            )


@dataclass(frozen=True)
class RemotePrediction:
    """Seconds: until the compressed cache is there, of one cycle of drafts and verify, of a request; of a verifying GPU
    per verify; and of a request that waits for its full cache instead. ``gpus``: remote GPUs per verifying one
    (G_R / G_L) at which both are busy."""

    start: float
    cycle: float
    request: float
    verify: float
    full_request: float
    gpus: float


def remote(machine: Machine, load: Load, rounds: Rounds, where: Remote, rows: int, full_rows: int) -> RemotePrediction:
    """``rows`` requests draft on a remote GPU at a time; ``full_rows`` would fit there with full KV."""
    step = (load.weights + rows * load.kept) / machine.bandwidth
    forward = (load.weights + load.full) / machine.bandwidth
    reload = load.full / machine.link
    cycle = max(rounds.drafts * step, reload) + forward + where.trip
    cycles = where.output / rounds.gained
    start = load.kept / where.slow
    request = max(start + cycles * cycle, rows * start)  # the link into a GPU is shared by its requests
    verify = max(reload, forward)  # the next reload goes on beside a forward pass
    full_start = load.full / where.slow
    full_step = (load.weights + full_rows * load.full) / machine.bandwidth
    full_request = max(full_start + where.output * full_step, full_rows * full_start)
    gpus = where.local_share * request / (rows * cycles * verify)
    return RemotePrediction(start, cycle, request, verify, full_request, gpus)
