"""KVzip's scores of texts and the features of their tokens, from an engine in this process whose compressions are
watched."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams

from compressors import METHODS, CachedTokens
from compressors.kvzip import KVzip
from compressors.surrogate import token_features
from vericache.errors import CompressionError
from vericache.llm import LLM

SINKS, RECENT = 4, 32  # tokens that are always kept, so that their scores do not matter
SMALLEST = 1e-8  # a score below it is as good as none
_OUTPUT = 3  # tokens; a request for fewer is not compressed
_INSTRUCTION = 64  # tokens a scoring row adds to the part of the text it repeats

See = Callable[[int, Tensor, Tensor], None]  # layer, features [m, F], log scores [H, m]; without sinks and recent


class Scores:
    """A running engine. ``fingerprint`` is the model's."""

    def __init__(self, llm: LLM, seen: list[See]) -> None:
        self._llm, self._seen = llm, seen
        self.fingerprint: str = llm.collective_rpc("model_fingerprint")[0]

    def of(self, tokens: Sequence[int], see: See) -> None:
        """Score one text; ``see`` is called for every layer, in order.

        Raises:
            CompressionError: the engine could not score the text. ``see`` may have been called for some layers.
        """
        self._seen[:] = [see]
        params = SamplingParams(temperature=0, max_tokens=_OUTPUT, ignore_eos=True)
        (output,) = self._llm.generate([{"prompt_token_ids": list(tokens)}], params, use_tqdm=False)
        report = output.kv_transfer_params["vericache"]
        if report["mode"] != "draft":
            raise CompressionError(f"a text of {len(tokens)} tokens was not scored: {report['reason']}")


@contextmanager
def scores(model: str, longest: int, arguments: dict[str, Any]) -> Iterator[Scores]:
    """An engine for texts of up to ``longest`` tokens; ``arguments`` are vLLM's.

    The environment must be ``vericache.demo.worker.ENVIRONMENT``, which keeps the engine in this process.
    """
    seen: list[See] = []
    method = _recorder(lambda *layer: seen[0](*layer))
    METHODS[method.name] = method
    settings = {
        "mode": "draft", "compressor": method.name, "compressor_options": {}, "counts": "uniform", "ratio": 0.25,
        "sinks": SINKS, "recent": RECENT, "min_prompt_tokens": 4 * (SINKS + RECENT), "max_recoveries": 0,
        "surrogate": None, "page_format": "plain", "layer_bits": (),
    }  # fmt: skip
    row = min(longest, KVzip.options["chunk"]) + _INSTRUCTION
    engine = {
        "enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": 4, "max_num_batched_tokens": 2048,
        "max_model_len": longest + row + _OUTPUT,
    }  # fmt: skip
    try:
        llm = LLM(model, vericache=settings, **engine, **arguments)
        try:
            yield Scores(llm, seen)
        finally:
            llm.llm_engine.engine_core.shutdown()
    finally:
        del METHODS[method.name]


def _recorder(see: See) -> type[KVzip]:
    """KVzip that shows what it has scored, layer by layer, when a context is compressed."""

    class Recorder(KVzip):
        name = "kvzip_recorded"
        summary = "KVzip, watched while a surrogate is trained"
        reads_cache = True
        needs_rotary = True

        def read(self, layer: int, cached: CachedTokens) -> None:
            assert self.shape.rotary is not None
            positions = torch.arange(self.spec.sinks, self.num_tokens - self.spec.recent)
            found = self.scores()[layer][:, positions].clamp_min(SMALLEST)
            see(layer, token_features(cached, positions, self.shape.rotary), found.log())

    return Recorder
