"""Laws of the tasks besides Cloze: next items, reconstruction, and the batches made of them."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import small_config

from bert4rec.data.pieces import FOR_TRAINING, Size
from bert4rec.data.splits import Spans
from bert4rec.training.batches import (
    IGNORE,
    Batch,
    Task,
    make_batch,
    next_item_task,
    reconstruction_task,
    some_of,
)

N_ITEMS = PAD = 1000  # more than there are places, so that an item tells where it stood
MASK = N_ITEMS + 1
MAX_LEN = 12  # of the small config
USER_0 = 40  # user rows are not places in the spans


def spans_of(lengths: list[int]) -> Spans:
    ends = np.cumsum(lengths)
    tokens = np.arange(ends[-1], dtype=np.int32)
    return Spans(tokens, ends - lengths, ends, USER_0 + np.arange(len(lengths)))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def questions_of(task: Task, spans: Spans, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """The sequences of all windows, what is shown of them, and what is asked."""
    windows = task.windows(np.random.default_rng(0))
    sequences = torch.from_numpy(windows.padded(np.arange(len(windows)), PAD))
    return sequences, *task.ask(sequences, generator(seed))


@pytest.mark.parametrize("n_targets", [1, 3])
def test_after_each_item_the_next_ones_are_asked(n_targets: int) -> None:
    spans = spans_of([5, 2, 13, 9, 40])
    config = small_config(f"n_targets={n_targets}", "window_step=0.5")
    sequences, inputs, targets = questions_of(next_item_task(spans, N_ITEMS, config), spans)
    width = sequences.shape[1]
    assert width == MAX_LEN + 1
    assert torch.equal(inputs, sequences[:, :-1])
    assert targets.shape == (*inputs.shape, n_targets)
    for row, shown in enumerate(sequences.tolist()):
        for place in range(width - 1):
            for t in range(n_targets):
                where = place + 1 + t
                is_there = where < width and shown[where] != PAD
                wanted = shown[where] if is_there else IGNORE
                assert targets[row, place, t] == wanted


def test_windows_of_one_item_ask_nothing_and_are_left_out() -> None:
    spans = spans_of([1, 2, 1, 3, MAX_LEN + 1, 1])
    windows = next_item_task(spans, N_ITEMS, small_config()).windows(np.random.default_rng(0))
    assert windows.users.tolist() == [USER_0 + 1, USER_0 + 3, USER_0 + 4]
    assert windows.lengths.tolist() == [2, 3, MAX_LEN + 1]


@pytest.mark.parametrize("n_targets", [1, 3])
def test_at_most_so_many_places_are_asked_and_none_is_preferred(n_targets: int) -> None:
    n_rows, n_places = 6000, 9
    spans = spans_of([n_places + 1] * 100)
    task = next_item_task(spans, N_ITEMS, small_config("max_masked=2", f"n_targets={n_targets}"))
    plain = next_item_task(spans, N_ITEMS, small_config(f"n_targets={n_targets}"))
    sequences, inputs, all_targets = questions_of(plain, spans)
    n_asked = torch.zeros(n_places)
    for seed in range(n_rows // 100):
        again, targets = task.ask(sequences, generator(seed))
        assert torch.equal(again, inputs)
        is_asked = targets[:, :, 0] != IGNORE
        assert is_asked.sum(1).eq(2).all()
        # an asked place asks all that it asked before, another one nothing
        assert torch.equal(targets[is_asked], all_targets[is_asked])
        assert targets[~is_asked].eq(IGNORE).all()
        n_asked += is_asked.sum(0)
    share = 2 / n_places
    deviation = (share * (1 - share) / n_rows) ** 0.5
    assert (n_asked / n_rows - share).abs().max() < 5 * deviation


@settings(deadline=None, max_examples=50)
@given(
    rows=st.lists(st.lists(st.booleans(), min_size=8, max_size=8), min_size=1, max_size=10),
    n=st.integers(1, 10),
    seed=st.integers(0, 2**32),
)
def test_some_of_takes_only_true_places_and_as_many_as_there_are(
    rows: list[list[bool]], n: int, seed: int
) -> None:
    asked = torch.tensor(rows)
    taken = some_of(asked, n, generator(seed))
    assert not (taken & ~asked).any()
    assert taken.sum(1).tolist() == [min(n, sum(row)) for row in rows]


@pytest.mark.parametrize("max_masked", [None, 3])
def test_reconstruction_asks_every_item_or_some_and_hides_a_share(
    max_masked: int | None,
) -> None:
    spans = spans_of([1, 4, 12, 30] * 20)
    config = small_config("mask_ratio=0.3", f"max_masked={max_masked or 'none'}")
    task = reconstruction_task(spans, N_ITEMS, config)
    n_hidden = torch.zeros(MAX_LEN)
    n_real = torch.zeros(MAX_LEN)
    for seed in range(100):
        sequences, inputs, targets = questions_of(task, spans, seed)
        real = sequences != PAD
        assert targets.shape == (*sequences.shape, 1)
        asked = targets[:, :, 0] != IGNORE
        assert torch.equal(targets[:, :, 0], sequences.masked_fill(~asked, IGNORE))
        if max_masked is None:
            assert torch.equal(asked, real)
        assert not asked[~real].any()
        assert torch.equal(asked.sum(1), real.sum(1).clamp(max=max_masked or MAX_LEN))
        hidden = inputs != sequences
        assert inputs[hidden].eq(MASK).all()
        assert not hidden[~real].any()
        n_hidden += hidden.sum(0)
        n_real += real.sum(0)
    deviation = (0.3 * 0.7 / n_real) ** 0.5
    assert ((n_hidden / n_real - 0.3).abs() < 5 * deviation).all()


def asked_by(batch: Batch) -> Counter[tuple[int, tuple[int, ...], int, int]]:
    """Each question as its user, what is shown up to the asked place, that place, the target.

    Behind the last place that is asked a row may show its last item, where nothing looks.
    """
    questions: Counter[tuple[int, tuple[int, ...], int, int]] = Counter()
    for piece in batch.pieces:
        length = piece.tokens.shape[1]
        assert len(piece.tokens) == len(piece.users)
        assert piece.at.tolist() == sorted(piece.at.tolist())
        tokens, users = piece.tokens.tolist(), piece.users.tolist()
        for at, target in zip(piece.at.tolist(), piece.targets.tolist(), strict=True):
            row, place = divmod(at, length)
            questions[users[row], tuple(tokens[row][: place + 1]), place, target] += 1
    assert batch.n_asked == questions.total()
    return questions


@pytest.mark.parametrize("n_targets", [1, 3])
def test_a_batch_of_next_items_asks_what_the_windows_of_its_users_say(n_targets: int) -> None:
    spans = spans_of([1, 5, 30, 2, 13, 7] * 5)
    config = small_config(f"n_targets={n_targets}", "window_step=0.5")
    task = next_item_task(spans, N_ITEMS, config)
    windows = task.windows(np.random.default_rng(0))
    rows = np.random.default_rng(1).permutation(len(windows))[: len(windows) // 2]
    expected: Counter[tuple[int, tuple[int, ...], int, int]] = Counter()
    for row in rows:
        window = windows[row].tolist()
        owner = int(np.searchsorted(spans.ends, window[0], side="right"))
        for place in range(len(window) - 1):
            for target in window[place + 1 : place + 1 + n_targets]:
                expected[USER_0 + owner, tuple(window[: place + 1]), place, target] += 1
    batch = make_batch(task, windows, rows, PAD, generator(), Size(100, 10))
    assert len(batch.pieces) > 2
    assert batch.n_sequences == len(rows)
    assert asked_by(batch) == expected


def test_a_batch_of_reconstructions_asks_nothing_of_padding() -> None:
    spans = spans_of([1, 5, 30, 2, 13, 7] * 5)
    task = reconstruction_task(spans, N_ITEMS, small_config("mask_ratio=0.5", "window_step=none"))
    windows = task.windows(np.random.default_rng(0))
    batch = make_batch(task, windows, np.arange(len(windows)), PAD, generator(), Size(100, 10))
    asked: dict[int, list[int]] = {}
    for piece in batch.pieces:
        length = piece.tokens.shape[1]
        for at, target in zip(piece.at.tolist(), piece.targets.tolist(), strict=True):
            asked.setdefault(int(piece.users[at // length]), []).append(target)
            assert piece.tokens.flatten()[at] in (target, MASK)
    assert asked == {int(windows.users[i]): windows[i].tolist() for i in range(len(windows))}


@pytest.mark.parametrize("max_masked", ["none", "2"])
@pytest.mark.parametrize("kind", ["alike", "mixed"])
def test_a_batch_for_two_workers_can_be_shared_and_asks_the_same(
    max_masked: str, kind: str
) -> None:
    """However large the pieces may be that a model likes, no worker is left without one."""
    n_rows = 600
    lengths = [13] * n_rows if kind == "alike" else [2 + i % 12 for i in range(n_rows)]
    tokens = np.arange(sum(lengths), dtype=np.int32) % N_ITEMS
    ends = np.cumsum(lengths)
    spans = Spans(tokens, ends - lengths, ends, np.arange(n_rows))
    task = next_item_task(spans, N_ITEMS, small_config(f"max_masked={max_masked}"))
    windows, rows = task.windows(np.random.default_rng(0)), np.arange(n_rows)
    large = Size(2**20, 2**20)
    n_positions = int((windows.lengths - 1).sum())
    assert n_positions > 1.2 * FOR_TRAINING.positions  # or sharing it would cost more than it saves

    one = make_batch(task, windows, rows, PAD, generator(), large)
    assert len(one.pieces) == 1 or kind == "mixed"
    two = make_batch(task, windows, rows, PAD, generator(), large, n_workers=2)
    assert len(two.pieces) >= 2
    assert max(piece.tokens.numel() for piece in two.pieces) <= 0.6 * n_positions
    assert asked_by(one) == asked_by(two)
