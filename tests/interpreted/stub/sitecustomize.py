"""Lets vLLM's V2 model runner start on a CPU, through Triton's interpreter.

Python imports this module in every process that finds it on its path, which reaches the processes that a server starts.
"""

import os
from typing import Any


class AlwaysActive:
    """vLLM asks whether Triton has a driver for the platform; the interpreter needs none."""

    @staticmethod
    def is_active() -> bool:
        return True


def install() -> None:
    import triton.backends
    from triton.runtime.interpreter import InterpreterBuilder

    triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=AlwaysActive)
    store = InterpreterBuilder.create_masked_store

    def store_with_any_mask(self: Any, ptrs: Any, value: Any, mask: Any, policy: Any) -> Any:
        """The interpreter takes boolean masks only; vLLM's grammar kernel comes to an integer one."""
        mask.data = mask.data.astype(bool)
        return store(self, ptrs, value, mask, policy)

    InterpreterBuilder.create_masked_store = store_with_any_mask


if os.environ.get("TRITON_INTERPRET") == "1":
    install()
