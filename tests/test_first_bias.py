"""Where the bias of the items' scores starts."""

from pathlib import Path

import numpy as np
import pytest
import torch
from toys import quiet, random_histories, small_config

from bert4rec.config import load_config
from bert4rec.data.splits import Split, leave_one_out
from bert4rec.models import LEARNED
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.models.first_bias import first_bias
from bert4rec.models.learned import Learned
from bert4rec.training.distributed import Ranks
from bert4rec.training.gradients import CPU
from bert4rec.training.loop import train
from bert4rec.training.progress import TrainingDisplay
from bert4rec.training.rows import DealtRows
from bert4rec.training.sharded import _Own

HARDLY = ("training.steps=1", "training.learning_rate=1e-7", "second_stage.epochs=0")


def hardly_trained(name: str, split: Split, run: Path, *overrides: str) -> Learned:
    run.mkdir(exist_ok=True)
    config = small_config(*HARDLY, f"model.name={name}", *overrides)
    model = LEARNED[name](split.n_items, config.model, len(split.train))
    with TrainingDisplay(run, quiet()) as display:
        train(model, split, config, run, display, identity={}, hardware=CPU)
    return model


def test_scores_alone_would_draw_items_as_they_occur() -> None:
    counts = np.array([7, 0, 1, 30])
    chances = torch.softmax(first_bias("popularity", counts), 0)
    torch.testing.assert_close(chances, torch.tensor([8, 1, 2, 31]) / 42)
    assert not first_bias("zero", counts).any()


@pytest.mark.parametrize("name", ["bert4rec", "caser", "cdae", "gru4rec"])
def test_training_begins_at_popularity(name: str, tmp_path: Path) -> None:
    split = leave_one_out(random_histories(0))
    popular = hardly_trained(name, split, tmp_path / "a", "model.bias_init=popularity")
    expected = first_bias("popularity", split.train_counts)
    assert expected.std() > 0.1
    torch.testing.assert_close(popular.get_parameter("output_bias"), expected, atol=1e-4, rtol=0)
    plain = hardly_trained(name, split, tmp_path / "b")
    assert plain.get_parameter("output_bias").abs().max() < 1e-4


def test_validation_items_count_where_they_are_trained_on(tmp_path: Path) -> None:
    split = leave_one_out(random_histories(0))
    wanted = ("model.bias_init=popularity", "training.on_validation=true", "training.epochs=1")
    model = hardly_trained("bert4rec", split, tmp_path, *wanted)
    expected = first_bias("popularity", split.training_on_validation().train_counts)
    assert not torch.allclose(expected, first_bias("popularity", split.train_counts), atol=1e-2)
    torch.testing.assert_close(model.get_parameter("output_bias"), expected, atol=1e-4, rtol=0)


def test_a_model_without_a_bias_trains_all_the_same(tmp_path: Path) -> None:
    split = leave_one_out(random_histories(0))
    model = hardly_trained("sasrec", split, tmp_path, "model.bias_init=popularity")
    assert not model.no_bias.any()


def test_dealt_out_biases_are_those_of_one_process() -> None:
    config = small_config("model.bias_init=popularity")
    bias = first_bias("popularity", np.arange(51))
    together = torch.full((51,), torch.nan)
    for rank in range(2):
        own = _Own(BERT4Rec(20, config.model), DealtRows(Ranks(2, rank)), bias, 2, config)
        assert own.output_bias is not None
        together[rank::2] = own.output_bias.detach()
    assert torch.equal(together, bias)


@pytest.mark.parametrize("recipe", ["default", "demo", "best-beauty"])
def test_recipes_for_any_data_begin_at_popularity(recipe: str) -> None:
    assert load_config(recipe).model.bias_init == "popularity"


@pytest.mark.parametrize("recipe", ["paper-ml-1m", "best-ml-1m"])  # the latter: docs/quality.md
def test_others_do_not(recipe: str) -> None:
    assert load_config(recipe).model.bias_init == "zero"
