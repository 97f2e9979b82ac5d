"""Laws of the objectives: which sequences an epoch has, what is queried, and how often."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bert4rec.data.splits import Spans
from bert4rec.objectives import (
    ClozeStage,
    DenoisingStage,
    LastItemStage,
    ModelSpec,
    NextItemStage,
    Objective,
    is_last_item,
    random_prefixes,
    random_subset,
    sliding_windows,
)

N_ITEMS = PAD = 1000  # more than there are places, so that an item tells where it stood
MASK = N_ITEMS + 1
MAX_LEN = 12
USER_0 = 40  # user rows are not places in the spans
SHAPE = ModelSpec(N_ITEMS, MAX_LEN)
WITH_MASK = ModelSpec(N_ITEMS, MAX_LEN, has_mask=True)


def spans_of(lengths: list[int]) -> Spans:
    ends = np.cumsum(lengths)
    tokens = np.arange(ends[-1], dtype=np.int32)
    return Spans(tokens, ends - lengths, ends, USER_0 + np.arange(len(lengths)))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def padded_sequences(objective: Objective, seed: int = 0) -> Tensor:
    sequences = objective.draw_sequences(np.random.default_rng(seed))
    return torch.from_numpy(sequences.padded(np.arange(len(sequences)), PAD))


def some_sequences(lengths: list[int], width: int) -> Tensor:
    rows = torch.full((len(lengths), width), PAD)
    for row, length in enumerate(lengths):
        rows[row, :length] = torch.arange(length) % 90
    return rows


# cloze


def hidden_by(stage: ClozeStage, sequences: Tensor, seed: int = 0) -> Tensor:
    """(B, L) which items are hidden, after a look at what the model sees and predicts."""
    objective = stage.build(spans_of([3]), WITH_MASK)
    inputs, targets, is_query = objective.make_examples(sequences, generator(seed))
    assert not objective.inserts_masks
    hidden = inputs == MASK
    assert torch.equal(inputs[~hidden], sequences[~hidden])
    assert torch.equal(targets[:, :, 0], sequences)
    assert torch.equal(is_query[:, :, 0], hidden)
    return hidden


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=20),
    mask_ratio=st.floats(0.01, 0.99),
    max_queries=st.one_of(st.none(), st.integers(1, 5)),
    seed=st.integers(0, 2**32),
)
def test_cloze_hides_something_of_every_sequence_and_never_all_of_it(
    lengths: list[int], mask_ratio: float, max_queries: int | None, seed: int
) -> None:
    sequences = some_sequences(lengths, 20)
    stage = ClozeStage(mask_ratio=mask_ratio, max_queries=max_queries, last_item_share=0.3)
    hidden = hidden_by(stage, sequences, seed)
    assert not hidden[sequences == PAD].any()
    for length, n in zip(lengths, hidden.sum(1).tolist(), strict=True):
        assert 1 <= n <= max(1, length - 1)
        assert max_queries is None or n <= max_queries


def test_cloze_hides_every_position_equally_often() -> None:
    sequences = some_sequences([10] * 20_000, 12)
    hidden = hidden_by(ClozeStage(mask_ratio=0.3, last_item_share=0), sequences)
    shares = hidden.float().mean(0)
    assert (shares[10:] == 0).all()
    # 0.3 each, but for the rows in which nothing, or all, was drawn (the first and last included)
    assert (shares[:10] - 0.3).abs().max() < 0.015


def test_cloze_hides_only_the_end_of_the_last_item_share() -> None:
    sequences = some_sequences([3, 7, 12] * 1000, 12)
    hidden = hidden_by(ClozeStage(mask_ratio=0.5, last_item_share=1), sequences)
    assert torch.equal(hidden, is_last_item(sequences, PAD))
    assert hidden.sum(1).eq(1).all()
    assert hidden[0, 2]
    assert hidden[2, 11]


# last_item


def test_last_item_leaves_out_single_items_and_hides_the_last_one() -> None:
    objective = LastItemStage().build(spans_of([1, 2, 9, 1, 30]), WITH_MASK)
    sequences = padded_sequences(objective)
    assert len(sequences) == 3
    inputs, targets, is_query = objective.make_examples(sequences, generator())
    assert torch.equal(is_query[:, :, 0], is_last_item(sequences, PAD))
    assert torch.equal(inputs, sequences.masked_fill(is_query[:, :, 0], MASK))
    assert torch.equal(targets[:, :, 0], sequences)
    assert not objective.inserts_masks


def test_prefixes_end_anywhere_after_the_first_item_and_some_at_the_end() -> None:
    spans = spans_of([2, 10, 50])
    ends = [random_prefixes(spans, 12, np.random.default_rng(seed)).ends for seed in range(2000)]
    for row, (start, end) in enumerate(zip(spans.starts, spans.ends, strict=True)):
        found = [int(each[row] - start) for each in ends]
        assert set(found) == set(range(2, end - start + 1))
        at_the_end = 0.1 + 0.9 / (end - start - 1)
        assert abs(found.count(end - start) / 2000 - at_the_end) < 0.04
    prefixes = random_prefixes(spans, 12, np.random.default_rng(0))
    assert (prefixes.lengths <= 12).all()


# next_item


@pytest.mark.parametrize("n_targets", [1, 3])
def test_next_item_predicts_the_items_after_each_one(n_targets: int) -> None:
    shape = ModelSpec(N_ITEMS, MAX_LEN, n_targets=n_targets)
    objective = NextItemStage(window_stride=0.5).build(spans_of([5, 2, 13, 9, 40]), shape)
    sequences = padded_sequences(objective)
    inputs, targets, is_query = objective.make_examples(sequences, generator())
    width = sequences.shape[1]
    assert width == MAX_LEN + 1
    assert torch.equal(inputs, sequences[:, :-1])
    assert targets.shape == is_query.shape == (*inputs.shape, n_targets)
    assert not objective.inserts_masks
    for row, shown in enumerate(sequences.tolist()):
        for place in range(width - 1):
            for t in range(n_targets):
                where = place + 1 + t
                is_there = where < width and shown[where] != PAD
                assert is_query[row, place, t] == is_there
                assert not is_there or targets[row, place, t] == shown[where]


def test_next_item_of_a_model_with_a_mask_leaves_a_position_for_it() -> None:
    """Every item but the first is queried after the one before it, by a [MASK] after that."""
    objective = NextItemStage(window_stride=None).build(spans_of([5, 2, 9, 1, 30]), WITH_MASK)
    sequences = padded_sequences(objective)
    inputs, targets, is_query = objective.make_examples(sequences, generator())
    assert objective.inserts_masks
    assert inputs.shape[1] == MAX_LEN - 1
    assert is_query.sum((1, 2)).tolist() == [4, 1, 8, MAX_LEN - 1]
    assert torch.equal(targets[is_query], inputs[is_query[:, :, 0]] + 1)


def test_next_item_leaves_out_sequences_of_one_item() -> None:
    spans = spans_of([1, 2, 1, 3, MAX_LEN + 1, 1])
    windows = NextItemStage().build(spans, SHAPE).draw_sequences(np.random.default_rng(0))
    assert windows.users.tolist() == [USER_0 + 1, USER_0 + 3, USER_0 + 4]
    assert windows.lengths.tolist() == [2, 3, MAX_LEN + 1]


@pytest.mark.parametrize("n_targets", [1, 3])
def test_next_item_queries_at_most_so_many_places_and_prefers_none(n_targets: int) -> None:
    n_rows, n_places = 6000, 9
    spans = spans_of([n_places + 1] * 100)
    shape = ModelSpec(N_ITEMS, MAX_LEN, n_targets=n_targets)
    some = NextItemStage(max_queries=2).build(spans, shape)
    every = NextItemStage().build(spans, shape)
    sequences = padded_sequences(every)
    all_queries = every.make_examples(sequences, generator())
    n_queries = torch.zeros(n_places)
    for seed in range(n_rows // 100):
        inputs, targets, is_query = some.make_examples(sequences, generator(seed))
        assert torch.equal(inputs, all_queries.inputs)
        assert torch.equal(targets, all_queries.targets)
        is_chosen = is_query[:, :, 0]
        assert is_chosen.sum(1).eq(2).all()
        # a chosen place has all targets that it had before, another one none
        assert torch.equal(is_query[is_chosen], all_queries.is_target[is_chosen])
        assert not is_query[~is_chosen].any()
        n_queries += is_chosen.sum(0)
    share = 2 / n_places
    deviation = (share * (1 - share) / n_rows) ** 0.5
    assert (n_queries / n_rows - share).abs().max() < 5 * deviation


def test_a_bidirectional_prefix_ends_at_a_random_item() -> None:
    """Queries go from there to the end of the sequence."""
    stage = NextItemStage(bidirectional_prefix=True, window_stride=None)
    objective = stage.build(spans_of([8] * 300 + [2]), WITH_MASK)
    _, _, is_query = objective.make_examples(padded_sequences(objective), generator())
    assert objective.inserts_masks
    firsts = set()
    for row, queried in enumerate(is_query[:, :, 0]):
        places = queried.nonzero()[:, 0].tolist()
        last = 6 if row < 300 else 0
        assert places == list(range(places[0], last + 1))
        firsts.add(places[0])
    assert firsts == set(range(7))


@given(
    rows=st.lists(st.lists(st.booleans(), min_size=8, max_size=8), min_size=1, max_size=10),
    n=st.integers(1, 10),
    seed=st.integers(0, 2**32),
)
def test_a_random_subset_holds_only_true_places_and_as_many_as_there_are(
    rows: list[list[bool]], n: int, seed: int
) -> None:
    is_query = torch.tensor(rows)
    taken = random_subset(is_query, n, generator(seed))
    assert not (taken & ~is_query).any()
    assert taken.sum(1).tolist() == [min(n, sum(row)) for row in rows]


# denoising


@pytest.mark.parametrize("max_queries", [None, 3])
def test_denoising_predicts_every_item_or_some_and_hides_a_share(max_queries: int | None) -> None:
    stage = DenoisingStage(mask_ratio=0.3, max_queries=max_queries, window_stride=0.5)
    objective = stage.build(spans_of([1, 4, 12, 30] * 20), SHAPE)
    sequences = padded_sequences(objective)
    is_real = sequences != PAD
    n_hidden, n_real = torch.zeros(MAX_LEN), torch.zeros(MAX_LEN)
    for seed in range(100):
        inputs, targets, is_query = objective.make_examples(sequences, generator(seed))
        assert torch.equal(targets[:, :, 0], sequences)
        queried = is_query[:, :, 0]
        if max_queries is None:
            assert torch.equal(queried, is_real)
        assert not queried[~is_real].any()
        assert torch.equal(queried.sum(1), is_real.sum(1).clamp(max=max_queries or MAX_LEN))
        hidden = inputs != sequences
        assert inputs[hidden].eq(MASK).all()
        assert not hidden[~is_real].any()
        n_hidden += hidden.sum(0)
        n_real += is_real.sum(0)
    deviation = (0.3 * 0.7 / n_real) ** 0.5
    assert ((n_hidden / n_real - 0.3).abs() < 5 * deviation).all()


# Windows.


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=20),
    max_len=st.integers(2, 30),
    stride=st.one_of(st.none(), st.floats(0.05, 1.0)),
)
def test_windows_fit_cover_and_stay_within_their_user(lengths: list[int], max_len: int, stride: float | None) -> None:
    spans = spans_of(lengths)
    windows = sliding_windows(spans, max_len, stride)
    assert (windows.lengths >= 1).all()
    assert (windows.lengths <= max_len).all()
    pairs = set(zip(windows.starts.tolist(), windows.ends.tolist(), strict=True))
    assert len(pairs) == len(windows)
    covered = np.zeros(len(spans.tokens), dtype=bool)
    for start, end, user in zip(windows.starts, windows.ends, windows.users, strict=True):
        owner = np.searchsorted(spans.ends, start, side="right")
        assert user == USER_0 + owner
        assert end <= spans.ends[owner]
        assert end - start == min(max_len, lengths[owner])  # all windows are full
        covered[start:end] = True
    if stride is None:
        assert len(windows) == len(spans)
        assert set(windows.ends.tolist()) == set(spans.ends.tolist())
    else:
        assert covered.all()
