"""The laws that every model of the lab obeys, with the settings of its own recipe.

Shapes are small; everything else is what a user gets from `bert4rec train --recipe NAME`.
"""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from toys import cycle, quiet, random_histories, sequences_of

from bert4rec.config import Config, load_config
from bert4rec.lab.contenders import TITLES
from bert4rec.models import FITTED, MODELS, Model
from bert4rec.pipeline import train_recommender
from bert4rec.recommender import Recommender

RECIPES = list(TITLES)
# No history can tell these in which order things happened, so the toy cycle is beyond them.
ORDER_BLIND = {"popularity", "item-knn", "bpr-mf", "neumf", "cdae"}
NEEDS_KNOWN_USER = {"bpr-mf", "neumf"}
N_ITEMS = 30
HISTORIES = [[1], [4, 5, 6], list(range(20)), [7, 7, 8, 7], [29, 3]]
SMALL = (
    "model.dim=8",
    "model.heads=1",
    "model.hidden=none",
    "model.max_len=12",
    "training.batch_size=16",
    "training.n_negatives=8",
    "training.validation_users=50",
    "training.workers=2",
    "evaluation.bootstrap=20",
)


def config_of(recipe: str, *overrides: str) -> Config:
    return load_config(recipe, None, [*SMALL, *overrides])


def trained(recipe: str, out: Path, seed: int = 0) -> Recommender:
    few = ("training.epochs=2", "second_stage.epochs=1", f"training.seed={seed}")
    sequences = random_histories(0, n_items=N_ITEMS)
    outcome = train_recommender(
        sequences, config_of(recipe, *few), out, baselines=False, console=quiet()
    )
    return outcome.recommender


@cache
def saved(recipe: str) -> tuple[Recommender, Path]:
    out = Path(mkdtemp()) / "model"
    return trained(recipe, out), out


def scores(model: Model, histories: list[list[int]], left: int = 0, right: int = 0) -> torch.Tensor:
    longest = max(map(len, histories))
    pad = [N_ITEMS]
    rows = [left * pad + h + pad * (longest - len(h) + right) for h in histories]
    return model.score(torch.arange(len(rows)), torch.tensor(rows))


def test_every_model_has_a_recipe() -> None:
    assert {load_config(recipe).model.name for recipe in RECIPES} == set(MODELS)


@pytest.mark.parametrize("recipe", RECIPES)
def test_scores_are_finite_alone_as_in_a_batch_and_whatever_the_padding(recipe: str) -> None:
    model = saved(recipe)[0].model
    together = scores(model, HISTORIES)
    assert together.shape == (len(HISTORIES), N_ITEMS)
    assert together.isfinite().all()
    for left, right in ((0, 3), (4, 0), (2, 2)):
        torch.testing.assert_close(
            scores(model, HISTORIES, left, right), together, atol=1e-5, rtol=1e-5
        )
    for row, history in enumerate(HISTORIES):
        alone = model.score(torch.tensor([row]), torch.tensor([history]))
        torch.testing.assert_close(alone[0], together[row], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_saved_model_gives_the_same_scores(recipe: str) -> None:
    recommender, out = saved(recipe)
    loaded = Recommender.load(out).model
    torch.testing.assert_close(
        scores(loaded, HISTORIES), scores(recommender.model, HISTORIES), atol=0, rtol=0
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_seed_gives_the_same_model_and_another_seed_another(
    recipe: str, tmp_path: Path
) -> None:
    first = saved(recipe)[0].model.state()
    again = trained(recipe, tmp_path / "again").model.state()
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    if recipe not in FITTED or recipe == "bpr-mf":
        other = trained(recipe, tmp_path / "other", seed=1).model.state()
        assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("recipe", RECIPES)
def test_who_reads_the_order_of_a_history_and_who_cannot(recipe: str) -> None:
    model = saved(recipe)[0].model
    history = [3, 9, 27, 14, 6]
    user = torch.tensor([0])
    forward = model.score(user, torch.tensor([history]))
    backward = model.score(user, torch.tensor([history[::-1]]))
    is_same = torch.allclose(forward, backward, atol=1e-6)
    assert is_same == (recipe in ORDER_BLIND)


def reads_order_left_to_right(recipe: str) -> bool:
    return recipe not in ORDER_BLIND and load_config(recipe).model.name != "bert4rec"


@pytest.mark.parametrize("recipe", [name for name in RECIPES if reads_order_left_to_right(name)])
def test_a_model_that_reads_order_learns_what_comes_next(recipe: str, tmp_path: Path) -> None:
    """a → b → c → … → a. Whoever ignores order is right one time in eight at best.

    BERT4Rec takes longer, and has a test of its own (test_model.py).
    """
    sequences = cycle()
    config = config_of(
        recipe,
        "model.dim=16",
        "model.dropout=0",
        "model.output_dropout=0",
        "training.epochs=25",
        "training.learning_rate=2e-2",
        "training.warmup_steps=5",
        "training.max_masked=none",
        "training.n_targets=1",  # with several, the next but one is as good an answer
        "training.validate_every=25",
        "evaluation.exclude_seen=false",  # the next item of a cycle has been seen before
    )
    outcome = train_recommender(
        sequences, config, tmp_path / "model", baselines=False, console=quiet()
    )
    assert outcome.evaluation.value("HR@1") > 0.95


@pytest.mark.parametrize("recipe", RECIPES)
def test_strangers_get_an_answer_or_are_told_why_not(recipe: str) -> None:
    recommender = saved(recipe)[0]
    if recipe in NEEDS_KNOWN_USER:
        with pytest.raises(ValueError, match="knows only the users that it was trained on"):
            recommender.recommend(["item-1", "item-2"])
    else:
        assert len(recommender.recommend(["item-1", "item-2"], k=5)) == 5


@pytest.mark.parametrize("recipe", sorted(NEEDS_KNOWN_USER))
def test_a_split_that_asks_about_strangers_is_refused_at_once(recipe: str, tmp_path: Path) -> None:
    histories = [[0, 1, 2, 3]] * 20 + [[4, 5, 6]] * 5  # the last users come when training is over
    sequences = sequences_of(histories, 8, times=True)
    config = config_of(recipe, "data.split=global-time")
    with pytest.raises(ValueError, match="knows only the users that it was trained on"):
        train_recommender(sequences, config, tmp_path / "model", console=quiet())
