"""Small data from host memory to a device."""

import torch
from torch import Tensor


def to_device(data: Tensor, device: torch.device) -> Tensor:
    """In stream order, and without waiting for the device."""
    return data if device.type == "cpu" else data.pin_memory().to(device, non_blocking=True)
