"""Laws of the training batches: what is asked, how often, and what is never lost."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import random_histories, small_config

from bert4rec.data.pieces import Size, like_lengths
from bert4rec.data.splits import Spans, leave_one_out
from bert4rec.training.batches import (
    cloze,
    cloze_task,
    epoch_order,
    last_item,
    last_item_task,
    make_batch,
    prefixes,
    sliding_windows,
)

PAD = 100


def some_sequences(lengths: list[int], width: int) -> torch.Tensor:
    rows = torch.full((len(lengths), width), PAD)
    for row, length in enumerate(lengths):
        rows[row, :length] = torch.arange(length) % 90
    return rows


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=20),
    probability=st.floats(0.01, 0.99),
    max_masked=st.one_of(st.none(), st.integers(1, 5)),
    seed=st.integers(0, 2**32),
)
def test_cloze_asks_every_sequence_and_never_hides_all_of_it(
    lengths: list[int], probability: float, max_masked: int | None, seed: int
) -> None:
    sequences = some_sequences(lengths, 20)
    hidden = cloze(
        sequences,
        pad=PAD,
        probability=probability,
        max_masked=max_masked,
        last_item_share=0.3,
        generator=torch.Generator().manual_seed(seed),
    )
    n_hidden = hidden.sum(1).tolist()
    assert not hidden[sequences == PAD].any()
    for length, n in zip(lengths, n_hidden, strict=True):
        assert 1 <= n <= max(1, length - 1)
        assert max_masked is None or n <= max_masked


def test_every_position_becomes_a_target_equally_often() -> None:
    sequences = some_sequences([10] * 20_000, 12)
    hidden = cloze(
        sequences,
        pad=PAD,
        probability=0.3,
        max_masked=None,
        last_item_share=0.0,
        generator=torch.Generator().manual_seed(0),
    )
    shares = hidden.float().mean(0)
    assert (shares[10:] == 0).all()
    # 0.3 each, but for the rows in which nothing, or all, was drawn (the first and last included)
    assert (shares[:10] - 0.3).abs().max() < 0.015


def test_the_last_item_share_asks_about_the_end_only() -> None:
    sequences = some_sequences([3, 7, 12] * 1000, 12)
    hidden = cloze(
        sequences,
        pad=PAD,
        probability=0.5,
        max_masked=None,
        last_item_share=1.0,
        generator=torch.Generator().manual_seed(0),
    )
    assert torch.equal(hidden, last_item(sequences, pad=PAD))
    assert hidden.sum(1).eq(1).all()
    assert hidden[0, 2]
    assert hidden[2, 11]


def spans_of(lengths: list[int]) -> Spans:
    ends = np.cumsum(lengths)
    tokens = np.arange(ends[-1], dtype=np.int32)
    return Spans(tokens, ends - lengths, ends, np.arange(len(lengths)))


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=20),
    max_len=st.integers(2, 30),
    step=st.one_of(st.none(), st.floats(0.05, 1.0)),
)
def test_windows_fit_cover_and_stay_within_their_user(
    lengths: list[int], max_len: int, step: float | None
) -> None:
    spans = spans_of(lengths)
    windows = sliding_windows(spans, max_len, step)
    sizes = windows.ends - windows.starts
    assert (sizes >= 1).all()
    assert (sizes <= max_len).all()
    pairs = set(zip(windows.starts.tolist(), windows.ends.tolist(), strict=True))
    assert len(pairs) == len(windows)
    covered = np.zeros(len(spans.tokens), dtype=bool)
    for start, end in zip(windows.starts, windows.ends, strict=True):
        owner = np.searchsorted(spans.ends, start, side="right")
        assert end <= spans.ends[owner]
        assert end - start == min(max_len, lengths[owner])  # all windows are full
        covered[start:end] = True
    if step is None:
        assert len(windows) == len(spans)
        assert set(windows.ends.tolist()) == set(spans.ends.tolist())
    else:
        assert covered.all()


def test_prefixes_end_anywhere_after_the_first_item() -> None:
    spans = spans_of([2, 10, 50])
    ends = [prefixes(spans, 12, 1.0, np.random.default_rng(seed)).ends for seed in range(2000)]
    for row, (start, end) in enumerate(zip(spans.starts, spans.ends, strict=True)):
        seen = {int(each[row] - start) for each in ends}
        assert seen == set(range(2, end - start + 1))
    whole = prefixes(spans, 12, 0.0, np.random.default_rng(0))
    assert whole.ends.tolist() == spans.ends.tolist()
    assert (whole.ends - whole.starts).tolist() == [2, 10, 12]


@given(n=st.integers(1, 700), batch_size=st.integers(1, 20), seed=st.integers(0, 99))
def test_an_epoch_uses_every_window_once(n: int, batch_size: int, seed: int) -> None:
    batches = epoch_order(n, batch_size, np.random.default_rng(seed))
    assert sorted(np.concatenate(batches).tolist()) == list(range(n))
    assert all(1 <= len(batch) <= batch_size for batch in batches)


def test_padded_reads_the_spans_and_pads_the_end() -> None:
    tokens = np.arange(100, 120, dtype=np.int32)
    starts, ends = np.array([0, 5, 19, 4]), np.array([3, 10, 20, 4])
    spans = Spans(tokens, starts, ends, np.arange(4))
    assert spans.padded(np.array([2, 0]), 999).tolist() == [[119, 999, 999], [100, 101, 102]]
    assert spans.padded(np.array([3]), 999).shape == (1, 0)
    assert spans.padded(np.array([3, 2]), 999).tolist() == [[999], [119]]


@pytest.mark.parametrize("replacement", ["mask", "80/10/10"])
def test_a_batch_asks_for_what_really_stood_there(replacement: str) -> None:
    split = leave_one_out(random_histories(0, n_users=400))
    config = small_config(f"replacement={replacement}", "mask_ratio=0.5")
    task = cloze_task(split.train, split.n_items, config)
    windows = task.windows(np.random.default_rng(0))
    generator = torch.Generator().manual_seed(0)
    rows = np.arange(len(windows))
    batch = make_batch(task, windows, rows, split.n_items, generator)
    assert batch.n_sequences == len(windows)
    assert batch.n_asked == sum(len(piece.at) for piece in batch.pieces)
    shown, restored = [], []
    for piece in batch.pieces:
        shown.append(piece.tokens.flatten()[piece.at])
        whole = piece.tokens.flatten().clone()
        whole[piece.at] = piece.targets
        restored += [row[row != split.n_items].tolist() for row in whole.view_as(piece.tokens)]
    is_mask = (torch.cat(shown) == split.n_items + 1).float().mean()
    assert is_mask == 1 if replacement == "mask" else 0.75 < is_mask < 0.85
    assert sorted(restored) == sorted(windows[row].tolist() for row in rows)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=300))
def test_pieces_are_all_of_the_batch_and_waste_little(lengths: list[int]) -> None:
    ordered = np.array(sorted(lengths, reverse=True))
    size = Size(400, 50)
    pieces = like_lengths(ordered, size)
    assert [i for piece in pieces for i in range(piece.start, piece.stop)] == [*range(len(ordered))]
    for piece in pieces:
        part = ordered[piece]
        assert len(part) * part[0] <= size.positions or len(part) == 1
        assert len(part) * part[0] - part.sum() <= size.padding


def test_the_last_item_task_leaves_out_single_items_and_asks_once_each() -> None:
    split = leave_one_out(random_histories(1))
    task = last_item_task(split.train, split.n_items, small_config())
    windows = task.windows(np.random.default_rng(0))
    assert len(windows) == (split.train.lengths >= 2).sum()
    generator = torch.Generator().manual_seed(0)
    rows = np.arange(len(windows))
    batch = make_batch(task, windows, rows, split.n_items, generator)
    assert batch.n_asked == len(windows)
    targets = torch.cat([piece.targets for piece in batch.pieces])
    assert sorted(targets.tolist()) == sorted(split.train.tokens[windows.ends - 1].tolist())
