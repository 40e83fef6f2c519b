"""The Triton kernel of draft attention against plain torch: on a GPU, or on the CPU through Triton's interpreter."""

import pytest
import torch

from tests.interpreted.arena_tables import Rows, expected, random_tables
from vericache.draft.triton_attention import Scratch, attend_arena, segment_starts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter's dot misreads bfloat16
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def run(counts: torch.Tensor, slots: list[int], tails: list[int], **shape: int) -> None:
    dtype = HALF if shape.get("half") else torch.float32
    page_tokens, dim, group = shape.get("page_tokens", 16), shape.get("dim", 32), shape.get("group", 3)
    generator = torch.Generator(DEVICE).manual_seed(5)
    heads = counts.shape[2]
    slot_tails = torch.zeros(counts.shape[0], dtype=torch.int64)
    for slot, tail in zip(slots, tails, strict=True):
        slot_tails[slot if slot >= 0 else 0] = max(tail, int(slot_tails[slot if slot >= 0 else 0]))
    tables = random_tables(counts.to(DEVICE), slot_tails.to(DEVICE), page_tokens, dim, dtype, generator)
    rows = Rows(torch.tensor(slots, dtype=torch.int32).to(DEVICE), torch.tensor(tails, dtype=torch.int32).to(DEVICE))
    query = torch.randn(len(slots), heads * group, dim, generator=generator, device=DEVICE).to(dtype)
    programs, least = shape.get("programs", 7), shape.get("share_tiles", 0)
    scratch = Scratch.of(programs, len(slots), heads, group, tables.format, DEVICE, least)
    starts = segment_starts(tables, rows.slot, rows.tail)
    tokens = torch.arange(len(slots), dtype=torch.int32, device=DEVICE)
    for layer in range(counts.shape[1]):
        output = torch.full_like(query, 7.0)
        attend_arena(query, output, tables, layer, rows.slot, rows.tail, tokens, starts, scratch, dim**-0.5)
        wanted = expected(query, tables, layer, rows, dim**-0.5)
        drafts = rows.slot >= 0
        error = (output.float() - wanted)[drafts].abs().max() if drafts.any() else torch.tensor(0.0)
        assert error < TOLERANCE[dtype], (layer, error)
        assert (output[~drafts] == 7.0).all()


@pytest.mark.parametrize("programs", [1, 2, 7, 64])
@pytest.mark.parametrize("page_tokens", [16, 32])
def test_ragged_heads_and_rows_without_a_slot(programs: int, page_tokens: int) -> None:
    """Every way in which shares and segments can meet: many segments in a share, many shares in a segment, equal."""
    counts = torch.randint(1, 150, (4, 2, 3), generator=torch.Generator().manual_seed(programs))
    counts[1, :, 0] = 400
    run(counts, [2, -1, 1, 3, -1], [5, 0, 17, 32, 0], programs=programs, page_tokens=page_tokens)


def test_page_edges() -> None:
    counts = torch.tensor([[[1, 16, 17]], [[15, 32, 33]]])
    for tail in (1, 16, 17):
        run(counts, [0, 1], [tail, tail], programs=5)


def test_no_kept_token_and_no_row() -> None:
    counts = torch.tensor([[[0, 0, 3]], [[0, 16, 0]]])
    run(counts, [0, 1], [3, 20], programs=4)
    run(counts, [-1, -1], [0, 0], programs=4)


@pytest.mark.parametrize(("heads", "group", "dim"), [(1, 1, 16), (2, 8, 64), (3, 3, 64), (2, 4, 128), (1, 32, 32)])
def test_shapes(heads: int, group: int, dim: int) -> None:
    counts = torch.randint(1, 60, (2, 1, heads), generator=torch.Generator().manual_seed(heads))
    run(counts, [1, 0], [4, 9], group=group, dim=dim, programs=3)


def test_half_precision() -> None:
    counts = torch.randint(1, 200, (2, 1, 2), generator=torch.Generator().manual_seed(0))
    run(counts, [1, 0], [4, 9], group=4, dim=64, programs=6, half=1)


def test_a_share_of_nothing() -> None:
    """More programs than pages."""
    run(torch.tensor([[[5]]]), [0], [1], group=2, programs=50)


@pytest.mark.parametrize("share_tiles", [1, 2, 4])
def test_a_share_is_never_small(share_tiles: int) -> None:
    """The last programs then have nothing to do."""
    counts = torch.randint(1, 1500, (2, 1, 2), generator=torch.Generator().manual_seed(share_tiles))
    run(counts, [1, 0], [4, 40], programs=20, share_tiles=share_tiles)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_graph_replays_other_rows() -> None:
    """Slots, tails and pages change between replays; the graph, its grid and its buffers do not."""
    generator = torch.Generator(DEVICE).manual_seed(3)
    counts = torch.randint(1, 300, (6, 2, 2), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    tails = torch.full((6,), 40, device=DEVICE)
    tables = random_tables(counts, tails, 32, 64, HALF, generator)
    slot, tail = (torch.full((8,), value, dtype=torch.int32, device=DEVICE) for value in (-1, 0))
    query = torch.randn(8, 6, 64, generator=generator, device=DEVICE).to(HALF)
    output, scratch = torch.zeros_like(query), Scratch.of(200, 8, 2, 3, tables.format, DEVICE, share_tiles=0)
    tokens = torch.arange(8, dtype=torch.int32, device=DEVICE)

    def step() -> None:
        starts = segment_starts(tables, slot, tail)
        attend_arena(query, output, tables, 1, slot, tail, tokens, starts, scratch, 0.125)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for slots, lengths in (
        ([0, 1, 2, 3, 4, 5, -1, -1], [40] * 8),
        ([-1] * 8, [0] * 8),
        ([-1, 5, -1, 2, 0] + [-1] * 3, [33] * 8),
    ):
        slot.copy_(torch.tensor(slots))
        tail.copy_(torch.tensor(lengths))
        output.zero_()
        graph.replay()
        # Tails of another length than the table was made for: only whole pages differ, and 33 and 40 need as many.
        wanted = expected(query, tables, 1, Rows(slot, tail), 0.125)
        assert torch.isfinite(output).all()
        assert (output.float() - wanted).abs().max() < TOLERANCE[HALF]
