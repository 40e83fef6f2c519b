"""Without a draft arena, on the V2 runner: its hooks find nothing to do, and every row of the batch is a request's."""

from typing import Any

from benchmarks.engine import summaries, tokens
from tests.interpreted.engine.v2_engine import V2Engine, params

SETTINGS: dict[str, Any] = {"mode": "auto", "arena_fraction": 0}


def test_plain_rows_and_nothing_else(engine: V2Engine) -> None:
    assert engine.worker is None
    layers = engine.scheduler.vllm_config.compilation_config.static_forward_context
    assert all(layer.impl.draft is None for layer in layers.values())
    assert engine.scheduler._seats == engine.scheduler.max_num_active_reqs
    prompts = [engine.prompt(60, 1), engine.prompt(75, 2)]
    together = engine.generate(prompts, params(2, 12, temperature=0.7))
    alone = [
        engine.generate([prompt], [one])[0] for prompt, one in zip(prompts, params(2, 12, temperature=0.7), strict=True)
    ]
    assert tokens(together) == tokens(alone)
    assert [s["mode"] for s in summaries(together)] == ["resident"] * 2
    engine.at_rest()
