"""``vericache.LLM``: vLLM's offline ``LLM`` with VeriCache switched on."""

from collections.abc import Mapping
from typing import Any

import vllm
from vllm import EngineArgs

from vericache.config import VeriCacheConfig, load
from vericache.engine.support import certified_refused, check_supported
from vericache.plugin import engine_arguments
from vericache.request_options import RequestSettings


class LLM(vllm.LLM):
    """As ``vllm.LLM``, with the additional argument ``vericache``: a ``VeriCacheConfig``, or a mapping of settings
    that overrides environment and file (see ``vericache.load``).

    Every finished ``RequestOutput`` says in ``kv_transfer_params["vericache"]`` how the request was served.

    A request may set ``vericache_*`` options in ``SamplingParams.extra_args`` (see ``RequestOptions``).

    Raises:
        ConfigError, UnsupportedError: before the engine starts.
        RequestError: before any request of the call starts.
    """

    def __init__(self, model: str, *, vericache: VeriCacheConfig | Mapping[str, Any] | None = None, **kwargs: Any):
        config = vericache if isinstance(vericache, VeriCacheConfig) else load(vericache)
        kwargs |= engine_arguments(config, kwargs)
        check_supported(EngineArgs(model=model, **kwargs).create_engine_config())
        super().__init__(model, **kwargs)
        self.vericache_config = config

    def _render_and_add_requests(self, prompts: Any, params: Any, **kwargs: Any) -> list[str]:
        """Everything vLLM's ``LLM`` starts comes through here (``entrypoints/common/offline.py``)."""
        refused = certified_refused(self.llm_engine.vllm_config)
        for each in params:
            RequestSettings(self.vericache_config, getattr(each, "extra_args", None), certified_refused=refused)
        return super()._render_and_add_requests(prompts, params, **kwargs)
