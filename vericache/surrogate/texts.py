"""The texts a surrogate is fitted on and measured with, as token ids."""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vericache.errors import ConfigError

SHORTEST = 256  # tokens; what is shorter has little that KVzip would drop


@dataclass(frozen=True)
class Text:
    """One document, in pieces of consecutive tokens that are scored one by one."""

    name: str
    pieces: tuple[tuple[int, ...], ...]

    @property
    def mark(self) -> str:
        """The same for the same tokens, whatever the file is called."""
        return hashlib.sha256(repr(self.pieces).encode()).hexdigest()[:16]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.pieces))


def cut(name: str, tokens: Sequence[int], longest: int) -> Text:
    """Pieces of ``longest`` tokens; a rest shorter than ``SHORTEST`` is left out."""
    pieces = (tuple(tokens[i : i + longest]) for i in range(0, len(tokens), longest))
    return Text(name, tuple(p for p in pieces if len(p) >= SHORTEST))


def read(paths: Iterable[Path], encode: Callable[[str], Sequence[int]], longest: int) -> tuple[list[Text], list[str]]:
    """The documents of files, and of folders with all they hold; and the names of files in folders that are left out
    because they hold no UTF-8 text or less than ``SHORTEST`` tokens.

    Raises:
        ConfigError: a path that does not exist; a file named itself that would be left out.
    """
    texts, left_out, seen = [], [], set[Path]()
    for path in paths:
        if not path.exists():
            raise ConfigError(f"there is no file or folder {path}, which --texts names")
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            if file.resolve() in seen:
                continue
            seen.add(file.resolve())
            try:
                text = cut(str(file), encode(file.read_text(encoding="utf-8")), longest)
                problem = None if text.pieces else f"holds fewer than {SHORTEST} tokens"
            except (OSError, UnicodeDecodeError) as error:
                text, problem = None, str(error)
            if text is not None and not problem:
                texts.append(text)
            elif path.is_dir():
                left_out.append(str(file))
            else:
                raise ConfigError(f"{file}, which --texts names, cannot be used: {problem}")
    return texts, left_out


def hold_out(texts: Sequence[Text], share: float) -> tuple[list[Text], list[Text]]:
    """(to train on, held out): whole texts, chosen by a hash of their tokens, so that the choice does not depend on the
    order or on names, and equal texts stay on one side.

    Raises:
        ConfigError: nothing is left to train on.
    """
    marks = sorted({t.mark for t in texts})
    held = set(marks[: math.ceil(share * len(marks))])
    train = [t for t in texts if t.mark not in held]
    if not train:
        raise ConfigError(
            f"{len(marks)} different texts, of which --hold-out {share} leaves none to train on; give more texts"
        )
    return train, [t for t in texts if t.mark in held]
