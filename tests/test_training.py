"""The training loop: schedule, early stopping, best weights, the second stage, what is shown."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from toys import cycle, quiet, random_histories, sequences_of, small_config

from bert4rec.config import ModelConfig
from bert4rec.data.splits import leave_one_out
from bert4rec.evaluation.evaluate import full_ranks
from bert4rec.evaluation.metrics import METRICS
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.pipeline import train_recommender
from bert4rec.recommender import Recommender
from bert4rec.training import loop, progress
from bert4rec.training import settled as settled_by
from bert4rec.training.loop import Stage, unreachable_note, validation_sample
from bert4rec.training.optimizer import Optimizer
from bert4rec.training.replica import copy_of

CYCLE = ("learning_rate=5e-3", "dropout=0", "evaluation.exclude_seen=false")


def events_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_the_learning_rate_warms_up_and_decays_to_nothing() -> None:
    stage = Stage("cloze", None, 1, 0.1, 9, None)  # type: ignore[arg-type]
    rates = [loop._learning_rate(stage, step, 100) for step in range(101)]
    assert rates[0] == pytest.approx(0.01)
    assert max(rates) == rates[9] == pytest.approx(0.1 * 0.91)
    assert rates[50] == pytest.approx(0.05)
    assert rates[100] == 0


def test_training_ends_after_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    """In the middle of an epoch, with a learning rate that has come down to nothing."""
    config = small_config("epochs=50", "training.steps=7", "second_stage.epochs=0")
    train_recommender(random_histories(0), config, tmp_path / "model", console=quiet())
    last = events_of(tmp_path / "model")[-1]
    assert last["step"] == 7
    assert last["learning_rate"] == 0


def test_weight_decay_spares_biases_and_layer_norm() -> None:
    model = BERT4Rec(10, ModelConfig(dim=8))
    config = small_config("weight_decay=0.3").training
    (adamw,) = Optimizer(model, config, is_sparse=False).optimizers
    decayed, spared = adamw.param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert decayed["weight_decay"] == 0.3
    assert spared["weight_decay"] == 0
    spared_names = {names[id(parameter)] for parameter in spared["params"]}
    expected = {n for n in names.values() if n.endswith("bias") or "norm" in n}
    assert spared_names == expected
    assert {names[id(p)] for p in decayed["params"]} == set(names.values()) - expected


def test_large_gradients_are_clipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms = []
    step = torch.optim.AdamW.step

    def watched(self: torch.optim.AdamW) -> None:
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norms.append(float(torch.stack([g.norm() for g in gradients]).norm()))
        step(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    config = small_config("epochs=2", "second_stage.epochs=0", "clip_norm=1e-3")
    train_recommender(random_histories(0), config, tmp_path / "model", console=quiet())
    assert norms
    assert max(norms) <= 1.001e-3


def test_best_weights_are_kept_and_the_second_stage_starts_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saved model scores the best NDCG@10 of the log on the validation sample, to the bit."""
    starts: list[dict[str, torch.Tensor]] = []
    bests: list[dict[str, torch.Tensor]] = []
    step = loop._Trainer._step

    def watched(self: loop._Trainer, *arguments: torch.Tensor) -> float:
        if self.progress.stage == 1 and self.progress.step == 0:
            starts.append(copy_of(self.trainee.model))
            bests.append(dict(self.trainee.best))
        return step(self, *arguments)

    monkeypatch.setattr(loop._Trainer, "_step", watched)
    sequences = cycle()
    config = small_config("epochs=25", "validate_every=1", "second_stage.epochs=8", *CYCLE)
    outcome = train_recommender(sequences, config, tmp_path / "model", console=quiet())
    assert all(torch.equal(starts[0][name], bests[0][name]) for name in starts[0])
    events = events_of(tmp_path / "model")
    questions = validation_sample(leave_one_out(sequences), config)
    ranks = full_ranks(outcome.recommender.model, questions, exclude_seen=False)
    assert float(METRICS["NDCG"](ranks, 10).mean()) == max(e["ndcg@10"] for e in events)
    assert {e["stage"] for e in events} == {"cloze", "last-item"}


def test_early_stopping_counts_validations_without_a_better_result(tmp_path: Path) -> None:
    config = small_config(
        "epochs=50", "learning_rate=1e-9", "validate_every=1", "patience=3", "second_stage.epochs=0"
    )
    train_recommender(random_histories(0), config, tmp_path / "model", console=quiet())
    events = events_of(tmp_path / "model")
    best = max(range(len(events)), key=lambda i: (events[i]["ndcg@10"], -i))
    assert len(events) == best + 1 + 3 < 50


def test_a_stage_that_has_nothing_to_train_on_is_left_out(tmp_path: Path) -> None:
    """Three actions a user leave one to train on: enough for the Cloze task, not for a prefix."""
    sequences = sequences_of([[i % 7, (i + 1) % 7, (i + 2) % 7] for i in range(30)], 7)
    screen = io.StringIO()
    config = small_config("epochs=2")
    train_recommender(sequences, config, tmp_path / "model", console=Console(file=screen))
    assert "last-item: left out" in screen.getvalue()


def test_plain_lines_where_there_is_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PLAIN_LINE_EVERY", 0.0)
    screen = io.StringIO()
    console = Console(file=screen, width=200)
    config = small_config("epochs=2", "second_stage.epochs=0")
    train_recommender(random_histories(0), config, tmp_path / "model", console=console)
    lines = screen.getvalue().splitlines()
    assert lines[0].startswith("memory plan: ")
    assert "= parameters " in lines[0]
    steps = [line for line in lines if "min left" in line]
    assert steps
    assert all(word in steps[0] for word in ("loss", "NDCG@10", "seq/s"))
    assert any("validation NDCG@10" in line for line in lines)
    assert "\x1b" not in screen.getvalue()


def test_a_live_display_on_a_terminal(tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=160, force_terminal=True)
    config = small_config("epochs=3", "second_stage.epochs=0")
    train_recommender(random_histories(0), config, tmp_path / "model", console=console)
    for word in ("cloze", "seq/s", "loss", "━"):
        assert word in screen.getvalue()


def test_tensorboard_gets_the_same_numbers_on_request(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = small_config("epochs=4", "second_stage.epochs=0")
    run = tmp_path / "model"
    train_recommender(random_histories(0), config, run, tensorboard=True, console=quiet())
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    shown = [event.value for event in board.Scalars("cloze/ndcg@10")]
    assert shown == pytest.approx([event["ndcg@10"] for event in events_of(run)])


def test_repeated_targets_are_pointed_out_before_training() -> None:
    questions = leave_one_out(cycle()).validation
    note = unreachable_note(questions, exclude_seen=True)
    assert note is not None
    assert "evaluation.exclude_seen=false" in note
    assert unreachable_note(questions, exclude_seen=False) is None
    fresh = leave_one_out(sequences_of([[0, 1, 2, 3]] * 5, 4)).validation
    assert unreachable_note(fresh, exclude_seen=True) is None


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path: Path) -> None:
    config = small_config("epochs=3", "learning_rate=1e30", "warmup_steps=0", "clip_norm=1e30")
    with pytest.raises(ValueError, match=r"lower training\.learning_rate"):
        train_recommender(random_histories(0), config, tmp_path / "model", console=quiet())


def test_too_little_data_says_so(tmp_path: Path) -> None:
    sequences = sequences_of([[0, 1], [1, 0], [2, 1]], 3)
    with pytest.raises(ValueError, match="nothing is left to validate on"):
        train_recommender(sequences, small_config(), tmp_path / "model", console=quiet())
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("many", "large", "loss", "gain"),
    [
        (9, 9, "cross-entropy", 1),
        (8, 9, "cross-entropy", 4),
        (8, 8, "sampled-softmax", 4),
    ],
)
def test_auto_is_settled_by_the_number_of_items(
    many: int, large: int, loss: str, gain: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model keeps what it was trained with, so that a resume and a reader see the same."""
    monkeypatch.setattr(settled_by, "MANY", many)
    monkeypatch.setattr(settled_by, "LARGE", large)
    config = small_config("training.loss=auto", "training.epochs=1")
    outcome = train_recommender(
        cycle(n_items=8), config, tmp_path, console=quiet(), baselines=False
    )
    saved = Recommender.load(tmp_path).config
    assert saved == outcome.recommender.config
    is_sampled = loss == "sampled-softmax"
    assert saved.training.loss == loss
    assert saved.training.negatives == ("popularity" if is_sampled else "uniform")
    assert saved.model.head_gain == gain
