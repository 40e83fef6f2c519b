"""Why a message cannot be decoded."""


class WireError(ValueError):
    """The bytes are not decoded: nothing is returned for them."""


class WireFormatError(WireError):
    """Not a message of this codec, of another version, or larger than the caller allows."""


class WireDamageError(WireError):
    """A message of this codec whose bytes were changed, cut off, or continued."""
