"""The laws that every registered model obeys, with the settings of its own recipe.

Shapes are small; everything else is what a user gets from `bert4rec train --recipe NAME`.
"""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from toys import cycle, quiet, random_histories, sequences_of

from bert4rec.config import Config, apply_overrides, load_config
from bert4rec.models import MODELS, FittedModel, Model, is_trained
from bert4rec.pipeline import RunOptions, train_recommender
from bert4rec.recommender import Recommender
from bert4rec.scoring import log_probabilities_of, score_rows
from bert4rec.settings import recipe_names

# Those for certain data are BERT4Rec of other sizes.
RECIPES = [name for name in recipe_names() if not name.startswith(("paper-", "best-", "demo"))]
MODEL_OF = {recipe: load_config(recipe).model.name for recipe in RECIPES}
# No history can tell these in which order things happened, so the toy cycle is beyond them.
ORDER_BLIND = {"popularity", "item-knn", "bpr-mf", "neumf", "cdae"}
NEEDS_KNOWN_USER = {name for name in MODELS if MODELS[name].needs_known_user}
N_ITEMS = 30
HISTORIES = [[1], [4, 5, 6], list(range(20)), [7, 7, 8, 7], [29, 3]]
SMALL = {
    "model": {"dim": 8, "heads": 1, "hidden": None, "max_len": 12},
    "loss": {"n_negatives": 8},
    "training": {"batch_size": 16, "validation_users": 50, "workers": 2},
}

every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def config_of(recipe: str, *overrides: str, **model: object) -> Config:
    """The recipe with the small values of those settings that it has."""
    values = load_config(recipe).model_dump()
    for section, small in SMALL.items():
        wanted = small | model if section == "model" else small
        values[section] |= {key: each for key, each in wanted.items() if key in values[section]}
    return Config.parse(apply_overrides(values, overrides), "small")


def trained(recipe: str, out: Path, seed: int = 0) -> Recommender:
    n_stages = len(load_config(recipe).stages)
    overrides = [f"stages.{place}.epochs={2 - place}" for place in range(n_stages)]
    config = config_of(recipe, f"training.seed={seed}", *overrides, epochs=2)
    sequences = random_histories(0, n_items=N_ITEMS)
    options = RunOptions(baselines=False)
    outcome = train_recommender(sequences, config, out, options, console=quiet())
    return outcome.recommender


@cache
def saved(recipe: str) -> tuple[Recommender, Path]:
    out = Path(mkdtemp()) / "model"
    return trained(recipe, out), out


def read_by(model: Model, history: list[int]) -> list[int]:
    n = model.max_history
    return history if n is None else history[max(0, len(history) - n) :]


def scores(model: Model, histories: list[list[int]], padding: int = 0) -> torch.Tensor:
    """Of known users 0, 1, …; padded at the end."""
    read = [read_by(model, history) for history in histories]
    longest = max(map(len, read)) + padding
    rows = [history + [N_ITEMS] * (longest - len(history)) for history in read]
    tokens = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), longest)
    return score_rows(model, torch.arange(len(rows)), tokens)


def test_every_model_has_a_recipe() -> None:
    assert set(MODEL_OF.values()) == set(MODELS)
    assert {"bpr-mf", "neumf"} == NEEDS_KNOWN_USER


@pytest.mark.parametrize("name", list(MODELS))
def test_a_model_says_what_it_is(name: str) -> None:
    cls = MODELS[name]
    assert cls.settings_class().name == name
    assert is_trained(cls) != issubclass(cls, FittedModel)
    assert is_trained(cls) == bool(cls.objectives)
    stages = load_config(overrides=[f"model.name={name}"]).stages
    assert {stage.objective for stage in stages} <= set(cls.objectives)


@every_recipe
def test_scores_are_finite_alone_as_in_a_batch_and_whatever_the_padding(recipe: str) -> None:
    model = saved(recipe)[0].model
    together = scores(model, HISTORIES)
    assert together.shape == (len(HISTORIES), N_ITEMS)
    assert together.dtype == torch.float32
    assert together.isfinite().all()
    short = [0, 1, 4]
    in_short = scores(model, [HISTORIES[row] for row in short], padding=3)
    unpadded = scores(model, [HISTORIES[row] for row in short])
    torch.testing.assert_close(in_short, unpadded, atol=1e-5, rtol=1e-5)
    for row, history in enumerate(HISTORIES):
        read = torch.tensor([read_by(model, history)], dtype=torch.int64)
        alone = score_rows(model, torch.tensor([row]), read)
        torch.testing.assert_close(alone[0], together[row], atol=1e-5, rtol=1e-5)


@every_recipe
def test_an_empty_history_has_finite_scores(recipe: str) -> None:
    model = saved(recipe)[0].model
    empty = score_rows(model, torch.tensor([0]), torch.empty((1, 0), dtype=torch.int64))
    assert empty.isfinite().all()
    padded = scores(model, [[], [1]])[:1]
    torch.testing.assert_close(padded, empty, atol=1e-5, rtol=1e-5)


@every_recipe
@torch.inference_mode()
def test_block_scores_are_parts_of_the_row_in_memory_of_their_own(recipe: str) -> None:
    model = saved(recipe)[0].model
    h = model.encode(torch.tensor([0, 1]), torch.tensor([[1], [4]])[:, : model.max_history])
    output = model.output_layer()
    whole = output.block_scores(h, 0, N_ITEMS)
    kept = whole.clone()
    part = output.block_scores(h, 7, 19)
    torch.testing.assert_close(part, whole[:, 7:19], atol=1e-6, rtol=1e-5)
    whole.fill_(-torch.inf)
    part.fill_(-torch.inf)
    torch.testing.assert_close(output.block_scores(h, 0, N_ITEMS), kept)
    chosen = torch.tensor([[3, 3, 20], [0, 29, 1]])
    torch.testing.assert_close(output.scores(h, chosen), kept.gather(1, chosen), atol=1e-6, rtol=1e-5)
    shared = torch.tensor([[5, 0]])
    torch.testing.assert_close(output.scores(h, shared), kept[:, [5, 0]], atol=1e-6, rtol=1e-5)


@every_recipe
def test_only_the_last_items_are_read(recipe: str) -> None:
    model = saved(recipe)[0].model
    if model.needs_known_user or model.max_history is None:
        return  # reads no history, or all of it
    n = model.max_history
    history = [token % 20 for token in range(n + 5)]
    other = [29] * 5 + history[5:]
    found = log_probabilities_of(model, model, [history, other], list(range(N_ITEMS)))
    torch.testing.assert_close(found[0], found[1], atol=0, rtol=0)


@every_recipe
def test_a_saved_model_gives_the_same_scores(recipe: str) -> None:
    recommender, out = saved(recipe)
    loaded = Recommender.load(out)
    assert loaded.config == recommender.config
    torch.testing.assert_close(scores(loaded.model, HISTORIES), scores(recommender.model, HISTORIES), atol=0, rtol=0)


@every_recipe
def test_the_same_seed_gives_the_same_model_and_another_seed_another(recipe: str, tmp_path: Path) -> None:
    first = saved(recipe)[0].model.state()
    again = trained(recipe, tmp_path / "again").model.state()
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    if is_trained(MODELS[MODEL_OF[recipe]]) or recipe == "bpr-mf":
        other = trained(recipe, tmp_path / "other", seed=1).model.state()
        assert any(not torch.equal(first[name], other[name]) for name in first)


@every_recipe
def test_who_reads_the_order_of_a_history_and_who_cannot(recipe: str) -> None:
    model, history = saved(recipe)[0].model, [3, 9, 27, 14, 6]
    forward, backward = scores(model, [history]), scores(model, [history[::-1]])
    assert torch.allclose(forward, backward, atol=1e-6) == (recipe in ORDER_BLIND)


def reads_order_left_to_right(recipe: str) -> bool:
    return recipe not in ORDER_BLIND and MODEL_OF[recipe] != "bert4rec"


@pytest.mark.parametrize("recipe", [name for name in RECIPES if reads_order_left_to_right(name)])
def test_a_model_that_reads_order_learns_what_comes_next(recipe: str, tmp_path: Path) -> None:
    """a → b → c → … → a. Whoever ignores order is right one time in eight at best.

    BERT4Rec takes longer, and has a test of its own (test_model.py).
    """
    overrides = ["training.warmup_steps=5", "training.validate_every=25"]
    overrides.append("evaluation.exclude_seen=false")  # a cycle's next item was seen before
    if load_config(recipe).stages:
        overrides += ["stages.0.epochs=25", "stages.0.learning_rate=2e-2"]
        overrides.append("stages.0.max_queries=none")
    # With several targets, the next but one is as good an answer.
    model = {"dim": 16, "dropout": 0, "output_dropout": 0, "n_targets": 1}
    config = config_of(recipe, *overrides, **model)
    options = RunOptions(baselines=False)
    outcome = train_recommender(cycle(), config, tmp_path / "model", options, console=quiet())
    assert outcome.evaluation.value("HR@1") > 0.95


@every_recipe
def test_unknown_users_get_an_answer_or_are_told_why_not(recipe: str) -> None:
    recommender = saved(recipe)[0]
    if MODEL_OF[recipe] in NEEDS_KNOWN_USER:
        with pytest.raises(ValueError, match="knows only the users that it was trained on"):
            recommender.recommend(["item-1", "item-2"])
    else:
        assert len(recommender.recommend(["item-1", "item-2"], k=5)) == 5


@pytest.mark.parametrize("recipe", sorted(NEEDS_KNOWN_USER))
def test_a_split_that_holds_out_unknown_users_is_refused_at_once(recipe: str, tmp_path: Path) -> None:
    histories = [[0, 1, 2, 3]] * 20 + [[4, 5, 6]] * 5  # the last users come when training is over
    sequences = sequences_of(histories, 8, times=True)
    config = config_of(recipe, "data.split=global-time")
    with pytest.raises(ValueError, match="knows only the users that it was trained on"):
        train_recommender(sequences, config, tmp_path / "model", console=quiet())
