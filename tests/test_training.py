"""The training loop: schedule, early stopping, best weights, stages, what is printed and logged."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from toys import cycle, quiet, random_histories, sequences_of, small_config

from bert4rec import config as config_module
from bert4rec import pipeline, progress
from bert4rec.config import load_config
from bert4rec.data.splits import leave_one_out
from bert4rec.evaluation.metrics import METRICS
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.models.sequence_model import SequenceModel
from bert4rec.objectives import ClozeStage
from bert4rec.pipeline import Outcome, RunOptions, train_recommender
from bert4rec.recommender import Recommender
from bert4rec.run_checks import unreachable_note
from bert4rec.scoring import rank_held_out
from bert4rec.training import optimizer
from bert4rec.training.checkpoint import RunDirectory
from bert4rec.training.loop import TrainingLoop, TrainingStage
from bert4rec.training.optimizer import Optimizer
from bert4rec.training.replica import copy_of
from bert4rec.training.setup import build_stages, stage_names, validation_users

CYCLE = ("stages.0.learning_rate=5e-3", "dropout=0", "evaluation.exclude_seen=false")
ONE_STAGE = "stages.1.epochs=0"
ALONE = RunOptions(baselines=False)


def trained(run: Path, *overrides: str, console: Console | None = None) -> Outcome:
    config = small_config(*overrides)
    outcome = train_recommender(random_histories(0), config, run, ALONE, console=console or quiet())
    return outcome


def events_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_the_learning_rate_warms_up_and_decays_to_nothing(tmp_path: Path) -> None:
    batches = SimpleNamespace(steps_per_epoch=100)
    stage = TrainingStage("cloze", ClozeStage(epochs=1, learning_rate=0.1), cast(Any, batches))
    config = small_config("warmup_steps=9")
    nothing = cast(Any, None)
    loop = TrainingLoop(nothing, [stage], None, config, RunDirectory(tmp_path, {}), nothing)
    rates = []
    for loop.progress.step in range(101):
        rates.append(loop._learning_rate(stage))
    assert rates[0] == pytest.approx(0.01)
    assert max(rates) == rates[9] == pytest.approx(0.1 * 0.91)
    assert rates[50] == pytest.approx(0.05)
    assert rates[100] == 0


def test_a_stage_ends_with_a_learning_rate_of_zero(tmp_path: Path) -> None:
    trained(tmp_path / "model", "stages.0.epochs=3", "stages.1.epochs=2")
    last_of_stage = {event["stage"]: event for event in events_of(tmp_path / "model")}
    assert [event["epoch"] for event in last_of_stage.values()] == [3, 2]
    assert all(event["learning_rate"] == 0 for event in last_of_stage.values())


def test_stages_are_named_by_their_objective() -> None:
    assert stage_names(small_config()) == ["cloze", "last_item"]
    assert stage_names(small_config("stages.0.epochs=0")) == ["last_item"]
    assert stage_names(small_config(recipe="demo")) == ["next_item 1", "next_item 2"]


def test_a_stage_without_epochs_is_left_out() -> None:
    split = leave_one_out(random_histories(0))
    stages = build_stages(small_config("stages.0.epochs=0"), split, n_workers=1)
    assert [stage.settings.objective for stage in stages] == ["last_item"]


def test_weight_decay_spares_biases_and_layer_norm() -> None:
    model = BERT4Rec(10, cast(Any, small_config().model))
    (adamw,) = Optimizer(model, 0.3).optimizers
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
    monkeypatch.setattr(optimizer, "CLIP_NORM", 1e-3)
    trained(tmp_path / "model", "stages.0.epochs=2", ONE_STAGE)
    assert norms
    assert max(norms) <= 1.001e-3


def test_best_weights_are_kept_and_the_second_stage_starts_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saved model scores the best NDCG@10 of the log on the validation sample, to the bit."""
    starts: list[dict[str, torch.Tensor]] = []
    bests: list[dict[str, torch.Tensor]] = []
    step = TrainingLoop._step

    def watched(self: TrainingLoop, *arguments: Any) -> tuple[float, list[float]]:
        if self.progress.stage_index == 1 and self.progress.step == 0:
            starts.append(copy_of(self.replica.model))
            bests.append(dict(self.replica.best))
        return step(self, *arguments)

    monkeypatch.setattr(TrainingLoop, "_step", watched)
    sequences = cycle()
    config = small_config("stages.0.epochs=25", "validate_every=1", "stages.1.epochs=8", *CYCLE)
    run = tmp_path / "model"
    outcome = train_recommender(sequences, config, run, ALONE, console=quiet())
    assert all(torch.equal(starts[0][name], bests[0][name]) for name in starts[0])
    events = events_of(run)
    held_out = validation_users(leave_one_out(sequences), config)
    assert held_out is not None
    ranks = rank_held_out(outcome.recommender.model, held_out, exclude_seen=False)
    best = max(event["ndcg@10"] for event in events)
    assert float(METRICS["NDCG"](ranks, 10).mean()) == best
    assert outcome.recommender.about["training"]["best_validation_ndcg@10"] == best
    assert {e["stage"] for e in events} == {"cloze", "last_item"}


def test_stages_are_kept_beside_the_model_on_request(tmp_path: Path) -> None:
    """Each file is the best so far: the last one is the model."""
    run, options = tmp_path / "model", RunOptions(baselines=False, keep_stages=True)
    config = small_config("stages.0.epochs=2", "stages.1.epochs=2")
    outcome = train_recommender(random_histories(0), config, run, options, console=quiet())
    first, last = (load_file(run / f"stage-{n}.safetensors") for n in (0, 1))
    model = outcome.recommender.model
    assert isinstance(model, SequenceModel)
    assert first.keys() == last.keys() == model.state().keys()
    assert all(torch.equal(last[name], tensor) for name, tensor in model.state().items())


def test_training_on_the_validation_items_keeps_the_last_weights(tmp_path: Path) -> None:
    """No validation is left to choose by: the log has losses only, of all epochs that were due."""
    settings = ("on_validation=true", "validate_every=2", "stages.1.epochs=2")
    outcome = trained(tmp_path / "model", "stages.0.epochs=3", *settings)
    events = events_of(tmp_path / "model")
    assert [(e["stage"], e["epoch"]) for e in events] == [("cloze", 2), ("cloze", 3), ("last_item", 2)]
    assert not any("ndcg@10" in event for event in events)
    facts = outcome.recommender.about["training"]
    assert facts["best_validation_ndcg@10"] is None
    assert (facts["best_stage"], facts["best_epoch"]) == (1, 2)


def test_early_stopping_counts_validations_without_a_better_result(tmp_path: Path) -> None:
    settings = ("stages.0.learning_rate=1e-9", "validate_every=1", "stages.0.patience=3")
    trained(tmp_path / "model", "stages.0.epochs=50", ONE_STAGE, *settings)
    events = events_of(tmp_path / "model")
    best = max(range(len(events)), key=lambda i: (events[i]["ndcg@10"], -i))
    assert len(events) == best + 1 + 3 < 50


def test_a_stage_that_has_nothing_to_train_on_is_left_out(tmp_path: Path) -> None:
    """Three actions per user leave one to train on: enough for `cloze`, not for a prefix."""
    sequences = sequences_of([[i % 7, (i + 1) % 7, (i + 2) % 7] for i in range(30)], 7)
    screen = io.StringIO()
    config, console = small_config("stages.0.epochs=2"), Console(file=screen)
    train_recommender(sequences, config, tmp_path / "model", ALONE, console=console)
    assert "last_item: skipped" in screen.getvalue()


def test_a_first_stage_that_has_nothing_to_train_on_is_an_error(tmp_path: Path) -> None:
    sequences = sequences_of([[i % 7, (i + 1) % 7, (i + 2) % 7] for i in range(30)], 7)
    config = small_config("stages.0.epochs=0")
    with pytest.raises(ValueError, match="no history is long enough to train on"):
        train_recommender(sequences, config, tmp_path / "model", ALONE, console=quiet())


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_UNSEEN", 0.0)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    screen = io.StringIO()
    console = Console(file=screen, width=200)
    trained(tmp_path / "model", "stages.0.epochs=2", ONE_STAGE, console=console)
    lines = screen.getvalue().splitlines()
    assert lines[0].startswith("memory estimate: ")
    assert "= parameters " in lines[0]
    steps = [line for line in lines if line.endswith(" left")]
    assert steps
    assert all(word in steps[0] for word in ("loss", "NDCG@10", "seq/s"))
    assert any("validation NDCG@10" in line for line in lines)
    assert "\x1b" not in screen.getvalue()


def test_a_live_display_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_UNSEEN", 0.0)
    screen = io.StringIO()
    console = Console(file=screen, width=160, force_terminal=True)
    trained(tmp_path / "model", "stages.0.epochs=3", ONE_STAGE, console=console)
    for word in ("cloze", "seq/s", "loss", "━"):
        assert word in screen.getvalue()


def test_tensorboard_gets_the_same_numbers_on_request(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config, run = small_config("stages.0.epochs=4", ONE_STAGE), tmp_path / "model"
    options = RunOptions(baselines=False, tensorboard=True)
    train_recommender(random_histories(0), config, run, options, console=quiet())
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    shown = [event.value for event in board.Scalars("cloze/ndcg@10")]
    assert shown == pytest.approx([event["ndcg@10"] for event in events_of(run)])


def test_repeated_targets_are_pointed_out_before_training() -> None:
    held_out = leave_one_out(cycle()).validation
    note = unreachable_note(held_out, exclude_seen=True)
    assert note is not None
    assert "evaluation.exclude_seen=false" in note
    assert unreachable_note(held_out, exclude_seen=False) is None
    fresh = leave_one_out(sequences_of([[0, 1, 2, 3]] * 5, 4)).validation
    assert unreachable_note(fresh, exclude_seen=True) is None


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "CLIP_NORM", 1e30)
    with pytest.raises(ValueError, match="lower the stage's learning_rate"):
        trained(tmp_path / "model", "stages.0.learning_rate=1e30", "warmup_steps=0")


def test_too_little_data_says_so(tmp_path: Path) -> None:
    sequences = sequences_of([[0, 1], [1, 0], [2, 1]], 3)
    with pytest.raises(ValueError, match="nothing is left to validate on"):
        train_recommender(sequences, small_config(), tmp_path / "model", console=quiet())
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("many", "large", "loss", "gain"),
    [(9, 9, "cross-entropy", 1), (8, 9, "cross-entropy", 4), (8, 8, "sampled-softmax", 4)],
)
def test_auto_is_resolved_by_the_number_of_items(
    many: int, large: int, loss: str, gain: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model keeps what it was trained with, so that a resume and a reader see the same."""
    monkeypatch.setattr(config_module, "SHARP_FROM", many)
    monkeypatch.setattr(config_module, "SAMPLED_FROM", large)
    overrides = ["loss.name=auto", "model.output_gain=auto", "stages.0.epochs=1", ONE_STAGE]
    overrides += ["model.dim=16", "model.max_len=12"]
    config = load_config("bert4rec-2-stage", None, overrides)
    outcome = train_recommender(cycle(n_items=8), config, tmp_path, ALONE, console=quiet())
    saved = Recommender.load(tmp_path).config
    assert saved == outcome.recommender.config
    assert saved.loss.name == loss
    negatives = "popularity" if loss == "sampled-softmax" else None
    assert getattr(saved.loss, "negatives", None) == negatives
    assert getattr(saved.model, "output_gain", None) == gain


def test_a_model_that_is_replaced_stays_whole_until_the_new_one_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("cannot be evaluated")

    monkeypatch.setattr(pipeline, "evaluate", fail)
    with pytest.raises(ValueError, match="cannot be evaluated"):
        train_recommender(random_histories(1), small_config(), tmp_path / "model", RunOptions(overwrite=True))
    Recommender.load(tmp_path / "model")  # whole, by its manifest
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
