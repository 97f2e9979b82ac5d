"""Laws of asking many prefixes in one pass: what a question sees, and what it is not told."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from toys import cycle, quiet, random_histories, sequences_of, small_config

from bert4rec.data.splits import Spans, leave_one_out
from bert4rec.evaluation.evaluate import full_ranks
from bert4rec.lab.contenders import Contender, check_asked_the_same
from bert4rec.lab.tune import tune
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.models.prefix_attention import of_prefixes
from bert4rec.pipeline import train_recommender
from bert4rec.training.batches import Task, cloze_task, last_item_task, make_batch
from bert4rec.training.distributed import Ranks
from bert4rec.training.rows import DealtRows
from bert4rec.training.sharded import _Own

N_ITEMS = PAD = 1000
NOBODY = torch.zeros(3, dtype=torch.int64)
EVERY_ITEM = ("second_stage.asks=every-item", "training.window_step=none")


def model_of(*overrides: str) -> BERT4Rec:
    torch.manual_seed(0)
    model = BERT4Rec(30, small_config(*overrides).model).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


def spans_of(lengths: list[int]) -> Spans:
    ends = np.cumsum(lengths)
    tokens = np.arange(ends[-1], dtype=np.int32)
    return Spans(tokens, ends - lengths, ends, np.arange(len(lengths)))


@given(st.integers(1, 40), st.integers(1, 3), st.integers(0, 2**31))
@settings(max_examples=20)
def test_the_fused_attention_is_the_plain_one(length: int, heads: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, heads, length, 4)
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for _ in range(5)]
    exact = [each.detach().double().requires_grad_() for each in inputs]  # the plain way
    grad = torch.randn(shape, generator=generator)
    found, wanted = of_prefixes(*inputs), of_prefixes(*exact)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-4)
    found.backward(grad)
    wanted.backward(grad.double())
    for a, b in zip(inputs, exact, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, atol=1e-4, rtol=1e-3)


def test_training_asks_what_recommending_asks_where_items_see_those_before_them() -> None:
    model = model_of("model.sees=before", "training.next_item_share=1")
    histories = torch.randint(0, 30, (3, 9))
    with torch.no_grad():
        at_once = model.asked_after(histories, torch.arange(27), NOBODY).view(3, 9, -1)
        for n in range(1, 10):
            tokens, at = model.question(histories[:, :n])
            one_by_one = model.asked(tokens, at, NOBODY)
            torch.testing.assert_close(at_once[:, n - 1], one_by_one, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sees", ["before", "both-sides"])
def test_padding_and_other_rows_change_nothing(sees: str) -> None:
    model = model_of(f"model.sees={sees}", "training.next_item_share=1")
    long, short = torch.randint(0, 30, (1, 9)), torch.randint(0, 30, (1, 4))
    rows = torch.cat([long, torch.cat([short, torch.full((1, 5), model.pad)], 1)])
    users = NOBODY[:2]
    with torch.no_grad():
        together = model.asked_after(rows, torch.tensor([2, 8, 10, 12]), users)
        alone = model.asked_after(short, torch.tensor([1, 3]), users[:1])
    torch.testing.assert_close(together[2:], alone, atol=1e-5, rtol=1e-5)
    scores = model.score(users, rows)
    torch.testing.assert_close(scores[1:], model.score(users[:1], short), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sees", ["before", "both-sides"])
@given(data=st.data())
@settings(max_examples=15)
def test_what_comes_later_does_not_change_an_answer(sees: str, data: st.DataObject) -> None:
    model = model_of(f"model.sees={sees}", "training.next_item_share=1")
    first = data.draw(st.integers(0, 8))
    changed_at = data.draw(st.integers(0, 8))
    at = torch.arange(first, 9)
    history = torch.randint(0, 30, (1, 9), generator=torch.Generator().manual_seed(first))
    other = history.clone()
    other[0, changed_at] = (history[0, changed_at] + 1) % 30
    with torch.no_grad():
        a, b = (model.asked_after(each, at, NOBODY[:1]) for each in (history, other))
    is_same = torch.isclose(a, b, atol=1e-6).all(1)
    assert is_same.tolist() == (at < changed_at).tolist()


def test_items_before_the_first_question_see_both_sides() -> None:
    """Item 0 is read through its neighbour: whether that saw what follows it makes a difference."""
    model, history = model_of(), torch.randint(0, 30, (1, 9))
    with torch.no_grad():
        from_there_on = model.asked_after(history, torch.tensor([5, 6]), NOBODY[:1])
        from_the_start = model.asked_after(history, torch.arange(9), NOBODY[:1])[5:7]
    assert not torch.allclose(from_there_on, from_the_start, atol=1e-3)


def batch_of(task: Task, spans: Spans, seed: int = 0) -> list[tuple[bool, list[int], list[int]]]:
    """(is_after, places asked, targets) of every row."""
    windows = task.windows(np.random.default_rng(seed))
    masks = torch.Generator().manual_seed(seed)
    batch = make_batch(task, windows, np.arange(len(windows)), PAD, masks)
    rows = []
    for piece in batch.pieces:
        owner = piece.at // piece.tokens.shape[1]
        for row in range(len(piece.tokens)):
            mine = owner == row
            places = (piece.at[mine] % piece.tokens.shape[1]).tolist()
            rows.append((piece.is_after, places, piece.targets[mine].tolist()))
            if piece.is_after:
                shown = piece.tokens[row, places].tolist()
                assert piece.targets[mine].tolist() == [item + 1 for item in shown]
    return rows


def test_every_item_but_the_first_is_asked_after_the_one_before_it() -> None:
    config = small_config("training.next_item_share=1", "training.window_step=none")
    rows = batch_of(cloze_task(spans_of([5, 2, 9, 1]), N_ITEMS, config), spans_of([5, 2, 9, 1]))
    assert sorted(len(places) for is_after, places, _ in rows if is_after) == [1, 4, 8]
    assert [places for is_after, places, _ in rows if not is_after] == [[0]]  # nothing before it


def test_a_share_of_the_windows_has_the_cloze_task() -> None:
    config = small_config("training.next_item_share=0.5")
    spans = spans_of([8] * 400)
    n_after = sum(
        is_after for is_after, _, _ in batch_of(cloze_task(spans, N_ITEMS, config), spans)
    )
    assert 150 < n_after < 250


def test_the_second_stage_asks_from_a_random_item_to_the_end() -> None:
    spans = spans_of([8] * 300 + [2])
    rows = batch_of(last_item_task(spans, N_ITEMS, small_config(*EVERY_ITEM)), spans)
    assert all(is_after for is_after, _, _ in rows)
    for _, places, targets in rows:
        assert places == list(range(places[0], places[-1] + 1))
        assert (targets[-1] + 1) % 8 == 0 or targets[-1] == 2401
    assert {places[0] for _, places, _ in rows} == set(range(7))


@pytest.mark.parametrize(
    "overrides",
    [
        ("training.next_item_share=1", "model.sees=before", "second_stage.epochs=0"),
        ("training.next_item_share=0.7", "second_stage.epochs=15", *EVERY_ITEM),
        ("training.next_item_share=1", "second_stage.epochs=15", "model.init=near", *EVERY_ITEM),
    ],
)
def test_it_learns_a_cycle(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = small_config(
        "model.init=identity",
        *overrides,
        "training.epochs=40",
        "training.validate_every=40",
        "training.learning_rate=3e-3",
        "model.dropout=0",
        "evaluation.exclude_seen=false",
    )
    sequences = cycle()
    outcome = train_recommender(sequences, config, tmp_path, console=quiet(), baselines=False)
    split = leave_one_out(sequences)
    ranks = full_ranks(outcome.recommender.model, split.validation, exclude_seen=False)
    assert (ranks == 1).float().mean() > 0.95


def items_of(spans: Spans) -> list[list[int]]:
    return [spans[i].tolist() for i in range(len(spans))]


def test_training_on_validation_items_reads_all_but_the_test_items() -> None:
    sequences = random_histories(0)
    split = leave_one_out(sequences).training_on_validation()
    histories = [sequences[user].tolist() for user in range(sequences.n_users)]
    wanted = {  # of a user with one or two actions none is held out
        user: history[:-1] if len(history) >= 3 else history
        for user, history in enumerate(histories)
    }
    read = dict(zip(split.train.users.tolist(), items_of(split.train), strict=True))
    assert read == wanted
    items = [item for history in wanted.values() for item in history]
    assert split.train_counts.tolist() == np.bincount(items, minlength=split.n_items).tolist()


def test_popularity_negatives_include_items_that_only_validation_has(tmp_path: Path) -> None:
    """Otherwise they are targets that are never pushed down, and end up recommended to all."""
    rng = np.random.default_rng(0)
    held_out = [20 + user % 20 for user in range(200)]  # one item in eight of a history
    histories = [[*rng.permutation(20)[:6].tolist(), item, item - 20] for item in held_out]
    config = small_config(
        "training.on_validation=true",
        "training.next_item_share=1",
        "training.loss=sampled-softmax",
        "training.negatives=popularity",
        "training.n_negatives=64",
        "training.epochs=20",
        "second_stage.epochs=0",
    )
    data = sequences_of(histories, 40)
    outcome = train_recommender(data, config, tmp_path, console=quiet(), baselines=False)
    asked = torch.from_numpy(np.array(histories)[:, :3])
    scores = outcome.recommender.model.score(torch.zeros(len(asked), dtype=torch.long), asked)
    assert scores.softmax(dim=-1)[:, 20:].sum(dim=-1).mean() < 0.3


def test_training_on_validation_items_validates_nothing_and_keeps_the_last_weights(
    tmp_path: Path,
) -> None:
    config = small_config(
        "training.on_validation=true", "training.epochs=3", "second_stage.epochs=2"
    )
    outcome = train_recommender(cycle(), config, tmp_path, console=quiet(), baselines=False)
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [event["stage"] for event in events] == ["cloze", "cloze", "last-item"]
    assert not any("ndcg@10" in event for event in events)
    facts = outcome.recommender.about["training"]
    assert (facts["best_stage"], facts["best_epoch"]) == (1, 2)
    assert facts["best_validation_ndcg@10"] is None


def eye_of(model: BERT4Rec) -> list[bool]:
    dim = model.head.in_features
    weights = [model.head.weight]
    for block in model.blocks:
        weights += [
            block.attention.output.weight,
            block.attention.query_key_value.weight[2 * dim :],
        ]
    return [torch.equal(weight, torch.eye(dim)) for weight in weights]


@pytest.mark.parametrize(("init", "check"), [("identity", all), ("paper", lambda x: not any(x))])
def test_where_the_weights_start(init: str, check: Callable[[list[bool]], bool]) -> None:
    assert check(eye_of(BERT4Rec(30, small_config(f"model.init={init}").model)))


def test_attention_can_start_with_near_items() -> None:
    """Before training `[MASK]` sees the item before it most, far ones less, itself hardly."""
    near = small_config("model.init=near", "model.dim=64", "model.max_len=40")
    model = BERT4Rec(300, near.model)
    weights = model.attention(torch.randperm(300)[:30])  # (layers, heads, 31, 31)
    own, by_distance = weights[0, :, -1].flip(-1).split([1, 30], -1)
    assert (own < 0.02).all()
    assert (by_distance.argmax(-1) == 0).all()
    near_ones, far = by_distance.split([10, 20], -1)
    assert (near_ones.mean(-1) > 2 * far.mean(-1)).all()
    even = BERT4Rec(300, near.model.model_copy(update={"init": "identity"}))
    spread = even.attention(torch.randperm(300)[:30])[0, :, -1].std(-1)
    assert (spread < 0.01).all()


def test_a_model_that_started_near_is_saved_and_loaded() -> None:
    config = small_config("model.init=near").model
    model = BERT4Rec(30, config)
    again = BERT4Rec.restore(model.state(), config, 30)
    history = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(
        model.score(NOBODY[:1], history), again.score(NOBODY[:1], history), atol=0, rtol=0
    )


def test_dealt_out_item_vectors_start_as_those_of_one_process() -> None:
    config = small_config("model.init=near")
    small = BERT4Rec(20, config.model)
    table = torch.full((53, 16), torch.nan)  # 51 items, PAD and MASK
    for rank in range(2):
        own = _Own(small, DealtRows(Ranks(2, rank)), torch.zeros(51), 2, config).items
        table[rank::2] = own.weight.detach()
    is_free = (small.items.weight[:20] == 0).all(0)
    assert is_free.any()
    assert torch.equal((table[:51] == 0).all(0), is_free)
    assert torch.equal(table[51:], small.items.weight[20:])


def test_the_weights_at_the_end_of_each_stage_can_be_kept(tmp_path: Path) -> None:
    config = small_config(
        "training.next_item_share=1",
        "training.keep_stages=true",
        "training.epochs=2",
        "second_stage.epochs=2",
        "second_stage.asks=every-item",
    )
    outcome = train_recommender(cycle(), config, tmp_path, console=quiet(), baselines=False)
    kept = {
        stage: load_file(tmp_path / f"{stage}.safetensors") for stage in ("next-item", "last-item")
    }
    final = outcome.recommender.model.state()
    assert all(torch.equal(kept["last-item"][name], value) for name, value in final.items())
    is_moved = [not torch.equal(kept["next-item"][name], value) for name, value in final.items()]
    best = json.loads((tmp_path / "about.json").read_text())["training"]["best_stage"]
    assert any(is_moved) == (best == 1)


def test_what_chooses_by_the_validation_items_refuses_to_train_on_them(tmp_path: Path) -> None:
    config = small_config("training.on_validation=true")
    with pytest.raises(ValueError, match="on_validation=false"):
        tune(random_histories(0), config, tmp_path / "study", quiet(), data_name="toy")
    with pytest.raises(ValueError, match="on_validation=false"):
        check_asked_the_same(Contender("mine", "Mine", config, "mine.toml"), small_config())


def test_simple_rivals_train_on_the_validation_items_too_where_the_model_does(
    tmp_path: Path,
) -> None:
    few = ("training.epochs=1", "second_stage.epochs=0", "model.name=popularity")
    sequences, counts = random_histories(0), []
    for on_validation in ("true", "false"):
        config = small_config(*few, f"training.on_validation={on_validation}")
        out = tmp_path / on_validation
        outcome = train_recommender(sequences, config, out, console=quiet(), baselines=False)
        counts.append(sum(float(each.sum()) for each in outcome.recommender.model.state().values()))
    split = leave_one_out(sequences)
    assert counts[0] - counts[1] == len(split.validation)


def test_the_softmax_starts_as_sharp_as_is_asked_for() -> None:
    history, scores = torch.tensor([[1, 2, 3]]), []
    for gain in (1, 4):
        torch.manual_seed(0)
        model = BERT4Rec(30, small_config(f"model.head_gain={gain}").model)
        scores.append(model.score(NOBODY[:1], history))
    torch.testing.assert_close(scores[1], 4 * scores[0])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("training.next_item_share=1", "model.attention_dropout=0.1"), "attention_dropout to 0"),
        (("second_stage.asks=every-item", "model.attention_dropout=0.1"), "attention_dropout to 0"),
        (("model.sees=before",), "next_item_share = 1"),
        (("training.on_validation=true", "data.split=global-time"), "leave-one-out"),
        (("model.head_gain=2", "model.head_norm=false"), "head_norm = true"),
        (("model.init=near", "model.positions=false"), "positions = true"),
        (("model.init=near", "model.dim=6", "model.heads=2"), "heads of 4 numbers"),
        (("next_item_share=1", "mask_ratio=0.4"), "mask_ratio: has no effect"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    overrides: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        small_config(*overrides)
