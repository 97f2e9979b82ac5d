"""Training on the validation items too: what is read, what is counted, and what is kept."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from toys import cycle, quiet, random_histories, sequences_of, small_config

from bert4rec.config import Config
from bert4rec.data.sequences import Sequences
from bert4rec.data.splits import leave_one_out
from bert4rec.pipeline import Outcome, RunOptions, train_recommender
from bert4rec.scoring import rank_held_out, score_rows

NEXT_ITEM = ("stages.0.objective=next_item", "stages.1.objective=next_item")
BIDIRECTIONAL = (*NEXT_ITEM, "stages.1.bidirectional_prefix=true", "stages.1.window_stride=none")


def trained(sequences: Sequences, config: Config, out: Path, *, keep_stages: bool = False) -> Outcome:
    options = RunOptions(baselines=False, keep_stages=keep_stages)
    outcome = train_recommender(sequences, config, out, options, console=quiet())
    return outcome


def test_all_but_the_test_items_are_read() -> None:
    sequences = random_histories(0)
    split = leave_one_out(sequences).training_on_validation()
    histories = [sequences[user].tolist() for user in range(sequences.n_users)]
    wanted = {  # of a user with one or two actions none is held out
        user: history[:-1] if len(history) >= 3 else history for user, history in enumerate(histories)
    }
    items = [split.train[row].tolist() for row in range(len(split.train))]
    assert dict(zip(split.train.users.tolist(), items, strict=True)) == wanted
    flat = [item for history in wanted.values() for item in history]
    assert split.train_counts.tolist() == np.bincount(flat, minlength=split.n_items).tolist()


def test_popularity_negatives_include_items_that_only_validation_has(tmp_path: Path) -> None:
    """Otherwise they are targets that are never pushed down, and end up recommended to all."""
    rng = np.random.default_rng(0)
    held_out = [20 + user % 20 for user in range(200)]  # one item in eight of a history
    histories = [[*rng.permutation(20)[:6].tolist(), item, item - 20] for item in held_out]
    config = small_config(
        "training.on_validation=true",
        *NEXT_ITEM,
        "loss.name=sampled-softmax",
        "loss.negatives=popularity",
        "loss.n_negatives=64",
        "stages.0.epochs=20",
        "stages.1.epochs=0",
    )
    model = trained(sequences_of(histories, 40), config, tmp_path).recommender.model
    read = torch.from_numpy(np.array(histories)[:, :3])
    scores = score_rows(model, torch.full((len(read),), -1), read)
    assert scores.softmax(dim=-1)[:, 20:].sum(dim=-1).mean() < 0.3


def test_nothing_is_validated_and_the_last_weights_are_kept(tmp_path: Path) -> None:
    config = small_config("training.on_validation=true", "stages.0.epochs=3", "stages.1.epochs=2")
    outcome = trained(cycle(), config, tmp_path)
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [event["stage"] for event in events] == ["cloze", "cloze", "last_item"]
    assert not any("ndcg@10" in event for event in events)
    facts = outcome.recommender.about["training"]
    assert (facts["best_stage"], facts["best_epoch"]) == (1, 2)
    assert facts["best_validation_ndcg@10"] is None


def test_fitted_models_count_the_validation_items_too(tmp_path: Path) -> None:
    sequences, counts = random_histories(0), []
    for on_validation in ("true", "false"):
        config = small_config("model.name=popularity", f"training.on_validation={on_validation}")
        model = trained(sequences, config, tmp_path / on_validation).recommender.model
        counts.append(int(model.state()["counts"].sum()))
    assert counts[0] - counts[1] == len(leave_one_out(sequences).validation)


# The stages of the recipe `default`.


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.name=bert4rec-causal", "stages.0.epochs=40"),
        ("stages.0.epochs=40", *BIDIRECTIONAL, "stages.1.epochs=15"),
    ],
    ids=["causal", "bidirectional prefix"],
)
def test_a_cycle_is_learned_from_prefixes(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = small_config(
        "model.initialization=local",
        *overrides,
        "stages.0.learning_rate=3e-3",
        "training.validate_every=40",
        "model.dropout=0",
        "evaluation.exclude_seen=false",
    )
    sequences = cycle()
    model = trained(sequences, config, tmp_path).recommender.model
    ranks = rank_held_out(model, leave_one_out(sequences).validation, exclude_seen=False)
    assert (ranks == 1).float().mean() > 0.95


def test_the_best_weights_of_each_stage_can_be_kept(tmp_path: Path) -> None:
    config = small_config(*BIDIRECTIONAL, "stages.0.epochs=2", "stages.1.epochs=2")
    outcome = trained(cycle(), config, tmp_path, keep_stages=True)
    kept = [load_file(tmp_path / f"stage-{number}.safetensors") for number in range(2)]
    final = outcome.recommender.model.state()
    assert all(torch.equal(kept[1][name], value) for name, value in final.items())
    is_moved = [not torch.equal(kept[0][name], value) for name, value in final.items()]
    best = outcome.recommender.about["training"]["best_stage"]
    assert any(is_moved) == (best == 1)
