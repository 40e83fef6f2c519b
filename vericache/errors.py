"""The closed set of errors VeriCache raises. Messages say what was observed, what was expected, what to do."""


class VeriCacheError(Exception):
    """Base of everything below."""


class ConfigError(VeriCacheError, ValueError):
    """A setting is unknown, has a wrong value, or does not fit the others. Raised before any work starts."""


class RequestError(VeriCacheError, ValueError):
    """A client asks for something this server cannot or may not do. Raised before the request starts."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class UnsupportedError(VeriCacheError):
    """The model, a vLLM feature or the vLLM version cannot be served losslessly by this design."""


class TransferError(VeriCacheError):
    """A copy between device pages and host pages failed. The request is recomputed, never guessed."""


class CompressionError(VeriCacheError):
    """A compressor failed. The request stays a plain vLLM row."""


class ArenaFullError(VeriCacheError):
    """The draft arena has fewer free pages than asked for. Nothing was allocated."""
