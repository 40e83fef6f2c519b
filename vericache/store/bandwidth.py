"""How fast a GPU's memory and its link to the host are, in a few milliseconds, before the memory is divided up."""

import torch

_MEMORY_BYTES = 256 << 20  # far more than any cache holds
_LINK_BYTES = 64 << 20  # 1.3 ms of a PCIe 5 link
_REPEATS = 5
SCATTERED = 0.9  # what scattered pages reach of it (docs/results/transfer.md)


def measured(device: torch.device) -> tuple[float, float]:
    """Bytes per second that the memory reads and writes together, and that reloads bring over the link."""
    source = torch.empty(_MEMORY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    host = torch.empty(_LINK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    memory = 2 * _MEMORY_BYTES / _seconds(target, source)
    link = SCATTERED * _LINK_BYTES / _seconds(target[:_LINK_BYTES], host)
    del source, target
    torch.cuda.empty_cache()  # it is about to be given to the KV cache
    return memory, link


def _seconds(target: torch.Tensor, source: torch.Tensor) -> float:
    """Of the fastest of a few copies: anything else on the machine only adds to it."""
    found = []
    for _ in range(_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return min(found)
