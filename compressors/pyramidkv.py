"""PyramidKV (Cai et al., 2024): more tokens in the first layers, fewer in the last."""

from typing import ClassVar

from compressors.snapkv import SnapKV


class PyramidKV(SnapKV):
    """SnapKV's scores under pyramid counts: attention is spread in the first layers and gathers on few tokens in the
    last ones. ``beta`` of the spec says how steep the pyramid is."""

    name = "pyramidkv"
    summary = "as snapkv, more tokens in the first layers than in the last; query-aware"
    counts: ClassVar[tuple[str, ...]] = ("pyramid",)
    default_counts = "pyramid"
