"""Mode auto on the V2 runner, whose row state is on the device: requests leave and come back, two steps in flight."""

from collections.abc import Iterable

import pytest
from vllm.v1.request import Request

from tests.interpreted.engine.v2_engine import V2Engine, params
from vericache.engine.coordinator import Coordinator
from vericache.engine.detached import Detached
from vericache.engine.elastic import Elastic


def test_to_and_fro(engine: V2Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may leave does, and comes back after its next verify."""
    moves: list[str] = []
    leave = Coordinator._leave

    def leaving(self: Elastic, ready: Iterable[Request], *_: object) -> list[Request]:
        return [r for r in ready if self._coordinator.terms.resident_reason(r) is None]

    def review(self: Elastic, room: int) -> None:
        self._room = room
        for record in self._coordinator.records.values():
            record.returning = True

    def counted(self: Coordinator, record: Detached, reason: str) -> None:
        moves.append(reason)
        leave(self, record, reason)

    monkeypatch.setattr(Elastic, "leaving", leaving)
    monkeypatch.setattr(Elastic, "review", review)
    monkeypatch.setattr(Coordinator, "_leave", counted)
    engine.same([engine.prompt(60, 1), engine.prompt(75, 2)], params(2, 24, temperature=0.7), mode="auto", ratio=0.5)
    assert moves.count("room") > 2
    assert set(moves) == {"room"}
