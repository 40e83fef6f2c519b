"""A matplotlib figure that ends up in a file; matplotlib is optional."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vericache.errors import ConfigError


@contextmanager
def figure(file: Path, width: float, height: float) -> Iterator[tuple[Any, Any]]:
    """``(figure, axes)`` of so many inches, saved to ``file`` on leaving. Raises ConfigError without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ConfigError(f"matplotlib, which draws {file}, is not installed; pip install matplotlib") from None

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(figsize=(width, height), layout="constrained")
    yield fig, axes
    file.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(file, dpi=110)
    plt.close(fig)
