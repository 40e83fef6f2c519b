"""Who is hit by an operation that failed: the request it belongs to, and those that rely on what it brings."""

from collections.abc import Callable, Collection, Iterable, Mapping

from vericache.engine.blocks import ids
from vericache.engine.detached import Detached
from vericache.engine.ops import Load, Offload, StepReport
from vericache.engine.plan import StepPlan
from vericache.engine.reservations import Reservations


def without_reload(
    plan: StepPlan, report: StepReport, records: Iterable[Detached], reserved: Reservations
) -> list[Detached]:
    """Requests that hold blocks which a failed reload of this step should have filled."""
    failed = {f.request_id for f in report.failures if f.op == Load.__name__}
    if not failed:
        return []
    loads = (op for op in plan.before if isinstance(op, Load) and op.request_id in failed)
    lost = {block for op in loads for block in op.blocks}
    reserved.transient.forget(lost)
    return [r for r in records if r.request_id in failed or not lost.isdisjoint(ids(r.blocks[: r.copies]))]


def without_copy(
    plan: StepPlan, report: StepReport, holders: Callable[[], Mapping[str, Collection[int]]], reserved: Reservations
) -> set[str]:
    """Requests whose copy to the host failed in this step, and those that hold a page of it. ``holders``: the host
    pages of each request, block by block. Nobody finds these pages any more, nor those behind them, nor what was
    reloaded from them: a copy made anew may go to the same pages."""
    failed = {f.request_id for f in report.failures if f.op == Offload.__name__}
    if not failed:
        return failed
    copies = (op for op in plan.before if isinstance(op, Offload) and op.request_id in failed)
    lost = {page for op in copies for page in op.pages}
    reserved.transient.forget_pages(lost)
    found = set(failed)
    for request_id, pages in holders().items():
        hit = [i for i, page in enumerate(pages) if page in lost]
        if hit:
            reserved.host.withdraw(list(pages)[hit[0] :])
            found.add(request_id)
    return found
