"""KV caches as bytes for a slow link: quantised, entropy coded, checked, decoded chunk by chunk as they arrive.

After CacheGen (Liu et al., SIGCOMM 2024, arXiv 2310.07240) and the codec of that name in LMCache. A message is not a
format to compute on: it is decoded to the model's dtype on arrival.

| | CacheGen | LMCache | here |
| --- | --- | --- | --- |
| values that are coded | differences to an anchor in groups of 10 tokens | every token | every token |
| quantisation | bins of 0.5, 1, 1.5 deviations by depth | max-abs of a token's channels, 32 or 16 bins | as LMCache |
| range of a token | | float16 | the tensor's own dtype, so exact |
| a channel's distribution | profiled offline | of 256 tokens, sent with them | of all tokens, a byte a bin |
| entropy coder | arithmetic | arithmetic, a stream per channel | rANS, a stream per 16 channels of 256 tokens |
| damage | | | CRC-32 of every part, coder states checked, sizes bounded |

Anchors are left out: keys are coded behind RoPE, where neighbours differ by the rotation, and anchors need a second
alphabet.

Raises everywhere: ``MethodError`` for what cannot be encoded, ``WireError`` for what cannot be decoded.
"""

from compressors.wire.container import MAX_BYTES
from compressors.wire.decoder import Decoder, decode
from compressors.wire.encoder import encode
from compressors.wire.errors import WireDamageError, WireError, WireFormatError
from compressors.wire.quantise import Bins, fake_quant

__all__ = [
    "MAX_BYTES",
    "Bins",
    "Decoder",
    "WireDamageError",
    "WireError",
    "WireFormatError",
    "decode",
    "encode",
    "fake_quant",
]
