"""Retrieval tasks in the manner of RULER (arXiv 2404.06654), made by rule from a seed and the bundled texts.

A context holds several facts and is compressed once, before any question is known; each question is asked behind it.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise

_WORDS = [
    "anchor", "basket", "candle", "desert", "engine", "forest", "garden", "hammer", "island", "jacket",
    "kettle", "ladder", "market", "needle", "orange", "pepper", "quarry", "ribbon", "saddle", "temple",
    "umbrella", "valley", "window", "yellow", "zipper", "bridge", "castle", "dragon", "falcon", "glacier",
    "harbor", "ivory", "jungle", "kitten", "lantern", "marble", "nectar", "oyster", "planet", "rocket",
    "silver", "tunnel", "velvet", "walnut", "acorn", "beacon", "copper", "dolphin",
]  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A context and what is asked about it: (question, answer), the answer as the model should go on."""

    name: str
    context: str
    questions: tuple[tuple[str, str], ...]


def _filler(characters: int, rng: random.Random) -> list[str]:
    """Sentences of the bundled prose, from a random one on."""
    folder = files("vericache.demo").joinpath("prompts")
    text = " ".join(folder.joinpath(f).read_text(encoding="utf-8") for f in ("loomings.txt", "sotu_1791.txt"))
    sentences = re.split(r"(?<=[.?!;]) +", " ".join(text.split()))
    start, found = rng.randrange(len(sentences)), list[str]()
    while sum(map(len, found)) < characters:
        found.append(sentences[(start + len(found)) % len(sentences)])
    return found


def _spread(lines: list[str], filler: list[str], rng: random.Random) -> str:
    """The lines at random places of the filler, in order."""
    for line, place in zip(reversed(lines), sorted(rng.sample(range(len(filler)), len(lines)))[::-1], strict=True):
        filler.insert(place, line)
    return " ".join(filler)


def needle(characters: int, rng: random.Random) -> Task:
    """Few facts far apart in prose."""
    keys = rng.sample(_WORDS, 4)
    facts = {key: str(rng.randrange(1000, 10000)) for key in keys}
    lines = [f"The special magic number for {key} is {number}." for key, number in facts.items()]
    return Task("needle", _spread(lines, _filler(characters, rng), rng), _asked(facts))


def multi_key(characters: int, rng: random.Random) -> Task:
    """Nothing but facts of the same kind."""
    line = "The special magic number for {} is {}."
    pairs = rng.sample(range(len(_WORDS) ** 2), characters // (len(line) + 14))
    keys = [f"{_WORDS[i // len(_WORDS)]}-{_WORDS[i % len(_WORDS)]}" for i in pairs]
    facts = {key: str(rng.randrange(1000, 10000)) for key in keys}
    lines = [line.format(key, number) for key, number in facts.items()]
    return Task("multi_key", "\n".join(lines), _asked({key: facts[key] for key in rng.sample(list(facts), 6)}))


def _asked(facts: dict[str, str]) -> tuple[tuple[str, str], ...]:
    ask = "\n\nQuestion: What is the special magic number for {0}?\nAnswer: The special magic number for {0} is"
    return tuple((ask.format(key), f" {number}") for key, number in facts.items())


def variables(characters: int, rng: random.Random) -> Task:
    """Chains of assignments in prose: what a variable holds was said of the first of its chain."""
    lines, questions = list[str](), list[tuple[str, str]]()
    for chain in range(2):
        value = str(rng.randrange(10000, 100000))
        names = [f"{chr(65 + rng.randrange(26))}{chr(65 + rng.randrange(26))}{chain}{i}" for i in range(3)]
        lines.append(f"VAR {names[0]} = {value}")
        lines += [f"VAR {b} = VAR {a}" for a, b in pairwise(names)]
        questions += [(f"\n\nQuestion: What is the value of VAR {n}?\nAnswer: VAR {n} =", f" {value}") for n in names]
    return Task("variables", _spread(lines, _filler(characters, rng), rng), tuple(questions))


def common_words(characters: int, rng: random.Random) -> Task:
    """A list of words, three of which come often."""
    often, seldom = rng.sample(_WORDS, 3), [f"{w}{rng.randrange(100)}" for w in _WORDS]
    count = characters // 9
    words = [word for word, share in zip(often, (0.3, 0.2, 0.1), strict=True) for _ in range(int(share * count))]
    words += rng.choices(seldom, k=count - len(words))
    rng.shuffle(words)
    listed = "Here is a list of words.\n\n" + ", ".join(words)
    ask = (
        "\n\nQuestion: What are the three most common words in the list above?\nAnswer: The three most common words are"
    )
    return Task("common_words", listed, ((ask, " " + ", ".join(often)),))


KINDS: dict[str, Callable[[int, random.Random], Task]] = {
    "needle": needle,
    "multi_key": multi_key,
    "variables": variables,
    "common_words": common_words,
}


def make(kind: str, characters: int, seed: int) -> Task:
    """A context of about so many characters; the same for the same seed."""
    return KINDS[kind](characters, random.Random(f"{kind} {seed}"))
