"""Which texts a surrogate is trained on and which are held out."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache.errors import ConfigError
from vericache.surrogate.texts import SHORTEST, Text, cut, hold_out, read


@given(tokens=st.integers(0, 5000), longest=st.integers(SHORTEST, 1000))
def test_pieces_are_the_text_but_for_a_short_rest(tokens: int, longest: int) -> None:
    text = cut("a", range(tokens), longest)
    joined = [t for piece in text.pieces for t in piece]
    assert joined == list(range(len(joined)))
    assert tokens - len(joined) < SHORTEST
    assert all(SHORTEST <= len(piece) <= longest for piece in text.pieces)
    assert text.tokens == len(joined)


def texts(count: int) -> list[Text]:
    return [Text(f"text{i}", ((i, i + 1),)) for i in range(count)]


@given(count=st.integers(2, 30), share=st.sampled_from([0.0, 0.1, 0.25, 0.5]), data=st.data())
def test_whole_texts_are_held_out_whatever_their_order(count: int, share: float, data: st.DataObject) -> None:
    given_texts = texts(count)
    train, held = hold_out(given_texts, share)
    assert len(held) == -int(-share * count // 1)
    assert {t.name for t in train} | {t.name for t in held} == {t.name for t in given_texts}
    assert not {t.mark for t in train} & {t.mark for t in held}
    again = hold_out(data.draw(st.permutations(given_texts)), share)[1]
    assert {t.name for t in again} == {t.name for t in held}


def test_equal_texts_stay_on_one_side() -> None:
    twins = [*texts(4), *(Text(f"copy of {t.name}", t.pieces) for t in texts(4))]
    train, held = hold_out(twins, 0.5)
    assert len(train) == len(held) == 4
    assert not {t.pieces for t in train} & {t.pieces for t in held}


def test_one_text_cannot_be_both() -> None:
    with pytest.raises(ConfigError, match=r"1 different texts, of which --hold-out 0.25 leaves none to train on"):
        hold_out(texts(1), 0.25)


def encode(text: str) -> list[int]:
    return list(text.encode())


def test_files_and_folders_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name, content in (("b.txt", b"b" * 700), ("deep/a.py", b"a" * 300), ("short", b"c"), ("binary", b"\xff" * 900)):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "named.txt").write_bytes(b"d" * 256)
    found, left_out = read([tmp_path, tmp_path / "named.txt"], encode, 500)
    names = [str(tmp_path / n) for n in ("b.txt", "deep/a.py", "named.txt")]
    assert [t.name for t in found] == names
    assert [[len(p) for p in t.pieces] for t in found] == [[500], [300], [256]]
    assert left_out == [str(tmp_path / n) for n in ("binary", "short")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file or folder"),
        (b"x", "holds fewer than 256 tokens"),
        (b"\xff" * 900, r"cannot be used: .*utf-8"),
    ],
)
def test_a_named_file_that_cannot_be_used_is_an_error(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read([path], encode, 500)
