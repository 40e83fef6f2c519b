"""GPUs by name: memory, memory bandwidth and host link, as their data sheets have them."""

from dataclasses import dataclass

from scheduler.byte_model import Machine

READ = 0.87  # of the data sheet's memory bandwidth: 4.2 of 4.8 TB/s, attention and weights on an H200
COPIED = 0.78  # of the data sheet's link: 50 of 64 GB/s, scattered pages over PCIe 5 (docs/results/transfer.md)
USED = 0.92  # of memory: vLLM's gpu_memory_utilization


@dataclass(frozen=True)
class GPU:
    """GB and GB per second, the link in one direction."""

    memory: float
    bandwidth: float
    link: float

    @property
    def machine(self) -> Machine:
        """What an engine has of it."""
        return Machine(USED * self.memory * 1e9, READ * self.bandwidth * 1e9, COPIED * self.link * 1e9)


GPUS = {
    "l4": GPU(24, 300, 32),
    "rtx4090": GPU(24, 1008, 32),
    "rtx5090": GPU(32, 1792, 64),
    "a10": GPU(24, 600, 32),
    "l40s": GPU(48, 864, 32),
    "rtx-pro-6000-server": GPU(96, 1597, 64),
    "a100-40": GPU(40, 1555, 32),
    "a100-80": GPU(80, 2039, 32),
    "h100": GPU(80, 3350, 64),
    "h100-nvl": GPU(94, 3900, 64),
    "h200": GPU(141, 4800, 64),
    "gh200": GPU(96, 4000, 450),
    "b200": GPU(180, 8000, 64),
}
