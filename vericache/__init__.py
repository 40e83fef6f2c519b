"""VeriCache: lossless serving with a compressed KV cache.

Long requests draft tokens on compressed KV, the full KV waits in host memory and is reloaded on a schedule to verify
the drafts, and the user gets exactly the tokens of full-KV decoding.
"""

from typing import TYPE_CHECKING, Any

from vericache.config import VeriCacheConfig, load
from vericache.errors import VeriCacheError

if TYPE_CHECKING:
    from vericache.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "VeriCacheConfig", "VeriCacheError", "load"]


def __getattr__(name: str) -> Any:
    # vLLM takes seconds to import; configuration and errors do not need it.
    if name == "LLM":
        from vericache.llm import LLM

        return LLM
    raise AttributeError(f"module 'vericache' has no attribute {name!r}")
