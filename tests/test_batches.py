"""Laws of the training batches: every query once, in microbatches that waste little."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import random_histories

from bert4rec.data.splits import FOR_TRAINING, MicrobatchSize, Spans, group_by_length, leave_one_out
from bert4rec.objectives import ClozeStage, DenoisingStage, LastItemStage, ModelSpec, NextItemStage, Objective
from bert4rec.threads import WorkerThreads
from bert4rec.training.batches import Batch, Sizes, StageBatches, make_batch, shuffled_batches
from bert4rec.training.process_group import SINGLE_PROCESS

N_ITEMS = PAD = 1000
MASK, MAX_LEN, USER_0 = N_ITEMS + 1, 12, 40
SMALL = Sizes(MicrobatchSize(100, 10))
Query = tuple[int, tuple[int, ...], int, int]


def spans_of(lengths: list[int]) -> Spans:
    ends = np.cumsum(lengths)
    tokens = np.arange(ends[-1], dtype=np.int32) % N_ITEMS
    return Spans(tokens, ends - lengths, ends, USER_0 + np.arange(len(lengths)))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def windows_of(objective: Objective) -> Spans:
    return objective.draw_sequences(np.random.default_rng(0))


@given(n=st.integers(1, 700), batch_size=st.integers(1, 20), seed=st.integers(0, 99))
def test_an_epoch_uses_every_sequence_once(n: int, batch_size: int, seed: int) -> None:
    batches = shuffled_batches(n, batch_size, np.random.default_rng(seed))
    assert sorted(np.concatenate(batches).tolist()) == list(range(n))
    assert all(1 <= len(batch) <= batch_size for batch in batches)


def test_padded_reads_the_spans_and_pads_the_end() -> None:
    tokens = np.arange(100, 120, dtype=np.int32)
    starts, ends = np.array([0, 5, 19, 4]), np.array([3, 10, 20, 4])
    spans = Spans(tokens, starts, ends, np.arange(4))
    assert spans.padded(np.array([2, 0]), 999).tolist() == [[119, 999, 999], [100, 101, 102]]
    assert spans.padded(np.array([3]), 999).shape == (1, 0)
    assert spans.padded(np.array([3, 2]), 999).tolist() == [[999], [119]]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=300))
def test_microbatches_are_all_of_the_batch_and_waste_little(lengths: list[int]) -> None:
    ordered = np.array(sorted(lengths, reverse=True))
    size = MicrobatchSize(400, 50)
    groups = group_by_length(ordered, size)
    assert [i for group in groups for i in range(group.start, group.stop)] == [*range(len(ordered))]
    for group in groups:
        part = ordered[group]
        assert len(part) * part[0] <= size.positions or len(part) == 1
        assert len(part) * part[0] - part.sum() <= size.padding


# What a batch queries is what its objective says.


def test_cloze_predicts_what_really_stood_there() -> None:
    split = leave_one_out(random_histories(0, n_users=400))
    shape = ModelSpec(split.n_items, MAX_LEN, has_mask=True)
    objective = ClozeStage(mask_ratio=0.5).build(split.train, shape)
    windows = windows_of(objective)
    batch = make_batch(objective, windows, split.n_items, generator())
    assert batch.n_sequences == len(windows)
    assert batch.n_queries == sum(len(each.positions) for each in batch.microbatches)
    restored = []
    for each in batch.microbatches:
        whole = each.tokens.flatten().clone()
        assert whole[each.positions].eq(split.n_items + 1).all()
        whole[each.positions] = each.targets
        restored += [row[row != split.n_items].tolist() for row in whole.view_as(each.tokens)]
    assert sorted(restored) == sorted(windows[row].tolist() for row in range(len(windows)))


def test_last_item_queries_each_sequence_once() -> None:
    split = leave_one_out(random_histories(1))
    shape = ModelSpec(split.n_items, MAX_LEN, has_mask=True)
    objective = LastItemStage().build(split.train, shape)
    windows = windows_of(objective)
    assert len(windows) == (split.train.lengths >= 2).sum()
    batch = make_batch(objective, windows, split.n_items, generator())
    assert batch.n_queries == len(windows)
    targets = torch.cat([each.targets for each in batch.microbatches])
    assert sorted(targets.tolist()) == sorted(split.train.tokens[windows.ends - 1].tolist())


def queries_of(batch: Batch) -> Counter[Query]:
    """Each query as its user, what is shown up to its position, the position, and the target.

    Behind the last query a row may show its last item, where nothing looks.
    """
    queries: Counter[Query] = Counter()
    for each in batch.microbatches:
        length = each.tokens.shape[1]
        assert len(each.tokens) == len(each.users)
        assert each.positions.tolist() == sorted(each.positions.tolist())
        tokens, users = each.tokens.tolist(), each.users.tolist()
        for flat, target in zip(each.positions.tolist(), each.targets.tolist(), strict=True):
            row, place = divmod(flat, length)
            queries[users[row], tuple(tokens[row][: place + 1]), place, target] += 1
    assert batch.n_queries == queries.total()
    return queries


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("n_targets", [1, 3])
def test_next_item_queries_what_the_windows_of_its_users_say(n_targets: int, has_mask: bool) -> None:
    spans = spans_of([1, 5, 30, 2, 13, 7] * 5)
    shape = ModelSpec(N_ITEMS, MAX_LEN, has_mask, n_targets)
    objective = NextItemStage(window_stride=0.5).build(spans, shape)
    windows = windows_of(objective)
    rows = np.random.default_rng(1).permutation(len(windows))[: len(windows) // 2]
    expected: Counter[Query] = Counter()
    for row in rows:
        window = windows[row].tolist()
        owner = int(np.searchsorted(spans.ends, window[0], side="right"))
        for place in range(len(window) - 1):
            for target in window[place + 1 : place + 1 + n_targets]:
                expected[USER_0 + owner, tuple(window[: place + 1]), place, target] += 1
    batch = make_batch(objective, windows.take(rows), PAD, generator(), SMALL)
    assert len(batch.microbatches) > 2
    assert batch.n_sequences == len(rows)
    assert {each.inserts_masks for each in batch.microbatches} == {has_mask}
    assert queries_of(batch) == expected


def test_denoising_queries_nothing_of_padding() -> None:
    spans = spans_of([1, 5, 30, 2, 13, 7] * 5)
    stage = DenoisingStage(mask_ratio=0.5, window_stride=None)
    objective = stage.build(spans, ModelSpec(N_ITEMS, MAX_LEN))
    windows = windows_of(objective)
    batch = make_batch(objective, windows, PAD, generator(), SMALL)
    queried: dict[int, list[int]] = {}
    for each in batch.microbatches:
        length = each.tokens.shape[1]
        for flat, target in zip(each.positions.tolist(), each.targets.tolist(), strict=True):
            queried.setdefault(int(each.users[flat // length]), []).append(target)
            assert each.tokens.flatten()[flat] in (target, MASK)
    assert queried == {int(windows.users[i]): windows[i].tolist() for i in range(len(windows))}


@pytest.mark.parametrize("max_queries", [None, 2])
@pytest.mark.parametrize("kind", ["alike", "mixed"])
def test_a_batch_for_two_workers_can_be_shared_and_queries_the_same(max_queries: int | None, kind: str) -> None:
    """However large the microbatches may be that a model likes, no worker is left without one."""
    n_rows = 600
    lengths = [13] * n_rows if kind == "alike" else [2 + i % 12 for i in range(n_rows)]
    stage = NextItemStage(max_queries=max_queries)
    objective = stage.build(spans_of(lengths), ModelSpec(N_ITEMS, MAX_LEN))
    windows, large = windows_of(objective), MicrobatchSize(2**20, 2**20)
    n_positions = int((windows.lengths - 1).sum())
    assert n_positions > 1.2 * FOR_TRAINING.positions  # or sharing it would cost more than it saves

    one = make_batch(objective, windows, PAD, generator(), Sizes(large))
    assert len(one.microbatches) == 1 or kind == "mixed"
    two = make_batch(objective, windows, PAD, generator(), Sizes(large, n_workers=2))
    assert len(two.microbatches) >= 2
    assert max(each.tokens.numel() for each in two.microbatches) <= 0.6 * n_positions
    assert queries_of(one) == queries_of(two)


# A step's batch follows from the seed, the stage and its place alone.


def batches_of(seed: tuple[int, int], epoch: int, first: int = 0) -> list[Batch]:
    objective = ClozeStage().build(spans_of([5, 9, 30, 12] * 8), ModelSpec(N_ITEMS, MAX_LEN, True))
    stage = StageBatches({0: objective}, seed, PAD, 10, SMALL, SINGLE_PROCESS)
    assert stage.steps_per_epoch == 4
    with WorkerThreads(1) as batch_thread:
        return list(stage.epoch(epoch, first, batch_thread))


def as_lists(batches: list[Batch]) -> list[list[list[int]]]:
    return [[each.tokens.tolist() for each in batch.microbatches] for batch in batches]


def test_a_resumed_epoch_has_the_batches_that_were_left() -> None:
    whole = as_lists(batches_of((3, 0), epoch=2))
    assert as_lists(batches_of((3, 0), epoch=2)) == whole
    assert as_lists(batches_of((3, 0), epoch=2, first=3)) == whole[3:]
    assert as_lists(batches_of((3, 0), epoch=2, first=4)) == []
    for seed, epoch in (((4, 0), 2), ((3, 1), 2), ((3, 0), 1)):
        assert as_lists(batches_of(seed, epoch)) != whole
