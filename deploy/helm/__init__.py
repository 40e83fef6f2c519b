"""The chart, and the model of its values."""

from pathlib import Path

CHART = Path(__file__).parent / "vericache"
