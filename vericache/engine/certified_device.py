"""Certified decode on the V2 runner's worker: by kernels, without a wait for the device until a step's report."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from compressors import Kept
from vericache.certified.attention import Policy
from vericache.certified.decided import Decided
from vericache.certified.device import DeviceOutcome, DeviceSampled, attend, limits_of, true_errors
from vericache.certified.sketch import PerChannel, sketch_keys
from vericache.certified.triton_rows import PROGRAMS, HeldRows, HostRows
from vericache.certified.workspace import Workspace
from vericache.device import to_device
from vericache.draft.step import CertifiedToken
from vericache.engine.certified_rows import CertifiedRows
from vericache.engine.ops import Compress
from vericache.errors import CompressionError

CPU_PROGRAMS = 2  # of Triton's interpreter, which runs them one after the other
COLUMNS = 4096  # the workspace grows by so many


@dataclass
class DeviceSlot:
    """What decisions about one slot read beside the arena. ``inclusion`` float32 and ``resident`` uint8 ``[L, H, n]``;
    ``positions`` int32, of kept tokens, of which those of a head begin at ``first`` int32 ``[L, H]``; ``pages`` int32,
    the context's host pages. ``asked``: the policy of its rows, as kernels read it."""

    request_id: str
    pages: Tensor
    inclusion: Tensor
    resident: Tensor
    positions: Tensor
    first: Tensor
    sketches: list[PerChannel]
    asked: tuple[Policy, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Of sketches, probabilities, and what says who is resident."""
        held = (self.inclusion, self.resident, self.positions, self.first)
        return sum(s.nbytes for s in self.sketches) + sum(each.nbytes for each in held)

    def limits(self, policy: Policy) -> Tensor:
        if self.asked is None or self.asked[0] != policy:
            self.asked = (policy, limits_of(policy, self.inclusion.device))
        return self.asked[1]


@dataclass(frozen=True)
class Seen:
    """What one layer of a row did; ``errors`` float64 ``[H]`` where they were measured."""

    request_id: str
    outcome: DeviceOutcome
    errors: Tensor | None


@dataclass
class CertifiedDevice(CertifiedRows):
    """The kernels of ``vericache.certified.device`` over arena, sketches and host pages."""

    _slots: dict[int, DeviceSlot] = field(default_factory=dict)
    _seen: list[Seen] = field(default_factory=list)
    _workspace: Workspace | None = None

    def __post_init__(self) -> None:
        data, cache = self.store.data, self.caches[0]
        # Copies move the bytes of a block as they lie.
        self._images = data.as_strided(data.shape, (*data.stride()[:2], *cache.stride()[1:]))
        self._device = cache.device
        order = self.layout.order
        self._order = None if order is None else to_device(order.int(), self._device)

    def fill(self, op: Compress, kept: Kept, blocks: Tensor) -> None:
        assert kept.inclusion is not None, "only samples can be certified"
        assert op.bound == "denominator", "others are refused at the door (engine.support.certified_refused)"
        counts = to_device(kept.counts, self._device)
        inclusion = kept.inclusion.float().contiguous()
        resident = torch.zeros(inclusion.shape, dtype=torch.uint8, device=self._device)
        head = torch.repeat_interleave(torch.arange(counts.numel(), device=self._device), counts.flatten())
        resident.flatten(0, 1)[head, kept.positions] = 1
        if (missing := (inclusion == 1) & (resident == 0)).any():
            raise CompressionError(f"{int(missing.sum())} tokens are certain and were not kept, expected all")
        everything = torch.arange(op.context, device=self._device)
        sketches = [self._sketch(self.layout.read_keys(cache, blocks, everything)) for cache in self.caches]
        self._slots[op.slot] = DeviceSlot(
            op.request_id,
            to_device(torch.tensor(op.pages, dtype=torch.int32), self._device),
            inclusion,
            resident,
            kept.positions.int(),
            (counts.flatten().cumsum(0) - counts.flatten()).view(counts.shape).int(),
            sketches,
        )

    @staticmethod
    def _sketch(keys: Tensor) -> PerChannel:
        sketch = sketch_keys(keys)
        assert isinstance(sketch, PerChannel), "the kernels read this kind"
        return sketch

    def drop(self, slot: int) -> None:
        self._slots.pop(slot, None)

    @property
    def bytes_held(self) -> int:
        return sum(slot.nbytes for slot in self._slots.values())

    def attend(self, asked: CertifiedToken, layer: int, query: Tensor, scale: float) -> Tensor:
        slot, policy = self._slots[asked.slot], asked.policy
        assert self.arena.tables is not None
        held = HeldRows(self.arena.tables, asked.slot, layer, slot.positions, slot.first[layer], asked.tail)
        host = HostRows(self._images[:, layer], slot.pages, self._order)
        sampled = DeviceSampled(slot.sketches[layer], slot.inclusion[layer], slot.resident[layer], held, host)
        grouped = query.unflatten(0, (self.arena.shape.kv_heads, -1))
        limits, work = slot.limits(policy), self._work(slot.inclusion.shape[-1] + asked.tail)
        outcome = attend(grouped, sampled, scale, policy.max_fetch, limits, work)
        errors = None
        if self._is_measured():
            errors = true_errors(grouped, sampled, scale, limits, work)
        self._seen.append(Seen(slot.request_id, outcome, errors))
        return outcome.output.flatten(0, 1)

    def _work(self, columns: int) -> Workspace:
        if self._workspace is None or self._workspace.columns < columns:
            shape, programs = self.arena.shape, PROGRAMS if self._device.type == "cuda" else CPU_PROGRAMS
            width = -(-columns // COLUMNS) * COLUMNS
            self._workspace = Workspace.of(shape.kv_heads, shape.group, shape.head_dim, width, programs, self._device)
        return self._workspace

    def take(self) -> dict[str, Decided]:
        """Waits for the device, once a step that has certified rows."""
        seen, self._seen = sorted(self._seen, key=lambda each: each.request_id), []
        return {name: self._decided(list(mine)) for name, mine in groupby(seen, lambda each: each.request_id)}

    def _decided(self, seen: list[Seen]) -> Decided:
        fetched = _gathered(each.outcome.fetched for each in seen)
        whole = _gathered(each.outcome.fallback for each in seen) > 0
        tokens, read = int(fetched.sum()), fetched > 0
        errors = [each.errors for each in seen if each.errors is not None]
        return Decided(
            fetched.numel(),
            int(read.sum()),
            tokens,
            tokens * self.token_bytes,
            int((whole & read).sum()),
            (float(_gathered(each.outcome.error for each in seen).max()),),
            tuple(_gathered(errors).flatten().tolist()) if errors else (),
        )


def _gathered(parts: Iterable[Tensor]) -> Tensor:
    """In host memory."""
    return torch.stack(list(parts)).cpu()
