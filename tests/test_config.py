"""Settings: what is merged, what a model, a loss and an objective have, and how mistakes read."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from toys import cycle, quiet

from bert4rec.config import (
    Config,
    EvaluationSettings,
    RunConfig,
    TrainingSettings,
    load_config,
    override_config,
    resolve,
    resolved_values,
    setting_descriptions,
)
from bert4rec.data.filters import DataSettings
from bert4rec.losses import LOSSES
from bert4rec.models import MODELS
from bert4rec.objectives import OBJECTIVES, ClozeStage, NextItemStage
from bert4rec.pipeline import RunOptions, train_recommender
from bert4rec.recommender import Recommender
from bert4rec.settings import description_of, recipe_names


def test_the_default_recipe_is_the_defaults_of_the_classes() -> None:
    assert load_config("default") == Config()
    assert load_config() == Config()


@pytest.mark.parametrize("recipe", recipe_names())
@pytest.mark.parametrize("n_items", [100, 50_000])
def test_every_recipe_is_resolved_and_no_auto_remains(recipe: str, n_items: int) -> None:
    run = resolve(load_config(recipe), n_items)
    values = [(name, value) for name, value, _ in setting_descriptions(run)]
    # These two depend on the machine, not on the data: a run may resume on another one.
    autos = {name for name, value in values if value == "auto"}
    assert autos <= {"training.device", "training.precision"}
    assert RunConfig.parse(run.model_dump(mode="json"), "saved") == run
    assert resolve(run, n_items) == run


def test_there_are_the_papers_recipes() -> None:
    papers = {"paper-ml-1m", "paper-beauty", "paper-steam", "paper-ml-20m"}
    assert papers | {"default", "demo"} <= set(recipe_names())


@pytest.mark.parametrize(
    ("n_items", "loss", "output_gain"),
    [(9_999, "cross-entropy", 1), (10_000, "cross-entropy", 4), (20_000, "sampled-softmax", 4)],
)
def test_auto_is_resolved_by_the_size_of_the_catalogue(n_items: int, loss: str, output_gain: float) -> None:
    run = resolve(Config(), n_items)
    assert (run.loss.name, run.model.output_gain) == (loss, output_gain)
    kept = resolve(load_config(overrides=["loss.name=bce", "model.output_gain=2"]), n_items)
    assert (kept.loss.name, kept.model.output_gain) == ("bce", 2)


def test_a_run_config_refuses_auto() -> None:
    with pytest.raises(ValueError, match=r"resolve\(config, n_items\)"):
        RunConfig()
    with pytest.raises(ValueError, match=r"saved: .*auto"):
        RunConfig.parse(Config().model_dump(), "saved")


def test_every_setting_is_described() -> None:
    classes = [DataSettings, TrainingSettings, EvaluationSettings]
    classes += [MODELS[name].settings_class for name in MODELS]
    classes += [*map(LOSSES.__getitem__, LOSSES), *map(OBJECTIVES.__getitem__, OBJECTIVES)]
    for cls in classes:
        assert all(description_of(cls, name) for name in cls.model_fields), cls
    described = {name: meaning for name, _, meaning in setting_descriptions(load_config("bert4rec"))}
    assert described["stages.0.mask_ratio"].startswith("rho")
    assert described["stages.0.learning_rate"].startswith("peak learning rate")


def test_at_most_45_settings_apply_to_a_run_of_bert4rec() -> None:
    classes = [DataSettings, MODELS["bert4rec"].settings_class, TrainingSettings]
    classes += [EvaluationSettings, LOSSES["sampled-softmax"]]
    names = {f"{cls.__name__}.{field}" for cls in classes for field in cls.model_fields}
    stages = [OBJECTIVES[each].model_fields for each in ("cloze", "last_item", "next_item")]
    names |= {f"stage.{field}" for fields in stages for field in fields}
    assert len(names) <= 45, sorted(names)


def test_the_papers_settings() -> None:
    config = load_config("paper-beauty")
    assert (config.model.dim, config.model.heads, config.model.max_len) == (256, 8, 50)
    (stage,) = config.stages
    assert isinstance(stage, ClozeStage)
    assert (stage.mask_ratio, stage.learning_rate) == (0.6, 1e-4)
    assert config.training.weight_decay == 0.01


def test_file_goes_over_recipe_and_set_over_both(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[model]\ndim = 32\n[[stages]]\nobjective = "cloze"\nepochs = 7\n')
    config = load_config("demo", file, ["stages.0.epochs=9", "data.split=global-time"])
    assert (config.model.dim, config.model.max_len) == (32, 64)  # the file's and the recipe's
    assert config.stages == (ClozeStage(epochs=9),)  # a list is replaced as a whole
    assert config.data.split == "global-time"
    assert config.model.layers == 2


def test_a_file_may_leave_out_the_model_and_the_stages(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[model]\ndim = 32\n")
    config = load_config("default", file)
    assert config == Config(model=config.model)
    assert config.model.name == "bert4rec"


def test_a_short_name_is_enough_where_it_is_clear() -> None:
    config = load_config("bert4rec", None, ["max_len=50", "epochs=3", "patience=null"])
    stage = config.stages[0]
    assert (config.model.max_len, stage.epochs, stage.patience) == (50, 3, None)
    with pytest.raises(ValueError, match=r"stages\.0\.epochs, stages\.1\.epochs"):
        load_config("bert4rec-2-stage", None, ["epochs=3"])


def test_none_is_written_as_a_word() -> None:
    config = load_config("bert4rec", None, ["stages.0.max_queries=none", "evaluation.users=none"])
    assert config.stages[0].max_queries is None
    assert config.evaluation.users is None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["stages.0.epoch=3"], ["stages.0.epoch", "did you mean 'epochs'", "window_stride"]),
        (["dims=3"], ["dims", "did you mean"]),
        (["trainig.seed=3"], ["trainig", "did you mean 'training'"]),
        (["training.seed=many"], ["training.seed", "'many'", "integer"]),
        (["stages.0.objective=cloze", "stages.0.mask_ratio=1.5"], ["stages.0.mask_ratio", "1.5"]),
        (["model.heads=3"], ["heads = 3", "dim = 64"]),
        (["epochs"], ["section.key=value"]),
        (["stages.0.learning_rate=NaN"], ["stages.0.learning_rate", "finite"]),
        (["loss.n_negatives=9"], ["n_negatives", "auto", "loss.name=sampled-softmax"]),
        (['model.ablation=["heads"]'], ["model.ablation", "'heads'", "residual"]),
        (["stages.2.epochs=3"], ["stages.2.epochs", "N from 0 to 1"]),
        (["model.name=sasrek"], ["model.name", "sasrek", "did you mean 'sasrec'"]),
        (["loss.name=bbce"], ["loss.name", "did you mean 'bce'"]),
        (["stages.1.objective=last"], ["objective", "'last'", "last_item"]),
        (["model.name=markov", "stages.0.epochs=3"], ["stages.0.epochs", "fitted"]),
    ],
)
def test_mistakes_name_the_setting_and_the_remedy(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r".+") as error:
        load_config(overrides=overrides)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "name", "known"),
    [
        (["model.window=9"], "model.window", MODELS["bert4rec"].settings_class),
        (["model.name=caser", "model.heads=2"], "model.heads", MODELS["caser"].settings_class),
        (["loss.name=bce", "loss.penalty=1"], "loss.penalty", LOSSES["bce"]),
        (["loss.name=cross-entropy", "loss.power=1"], "loss.power", LOSSES["cross-entropy"]),
        (["stages.0.mask_ratio=0.5"], "stages.0.mask_ratio", NextItemStage),
        (["training.sed=1"], "training.sed", TrainingSettings),
        (["evaluation.k=[1]"], "evaluation.k", EvaluationSettings),
        (["data.keep_last=3"], "data.keep_last", DataSettings),
    ],
)
def test_a_setting_that_is_not_there_is_an_error_that_names_those_that_are(
    overrides: list[str], name: str, known: type
) -> None:
    with pytest.raises(ValueError, match="unknown setting") as error:
        load_config(overrides=overrides)
    assert f"unknown setting {name!r}" in str(error.value)
    assert str(error.value).endswith(f"there are: {', '.join(known.model_fields)}")


def test_mistakes_in_a_nested_section_name_that_sections_settings() -> None:
    with pytest.raises(ValueError, match="did you mean 'seed'") as error:
        Config.parse({"training": {"sed": 1}}, "mine.toml")
    assert str(error.value).startswith("mine.toml: unknown setting 'training.sed'")
    assert "batch_size" in str(error.value)
    assert "evaluation" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.attention_dropout=0.1"], "attention_dropout to 0"),
        (["model.name=sasrec", "stages.0.objective=cloze"], "it has next_item"),
        (["model.name=sasrec", "stages.0.bidirectional_prefix=true"], "in one direction"),
        (["model.name=bert4rec-causal", "stages.0.objective=cloze"], "it has next_item"),
        (["training.on_validation=true", "data.split=global-time"], "leave-one-out"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_config(overrides=overrides)


def test_a_fitted_model_has_no_stages() -> None:
    assert load_config("popularity").stages == ()
    with pytest.raises(ValueError, match="only fitted"):
        Config.parse({"model": {"name": "markov"}, "stages": [{"objective": "cloze"}]}, "here")
    with pytest.raises(ValueError, match="write \\[\\[stages\\]\\]"):
        Config.parse({"stages": {"objective": "cloze"}}, "here")
    with pytest.raises(ValueError, match=r"stages\.0\.objective is missing"):
        Config.parse({"stages": [{"epochs": 3}]}, "here")


# Another model, loss or objective by an override.


def test_another_model_drops_only_the_settings_that_it_does_not_have() -> None:
    before = ["model.dim=32", "model.layers=3", "model.output_gain=2", "training.seed=5"]
    config = load_config("best-ml-1m", None, [*before, "model.name=sasrec"])
    kept = {"name": "sasrec", "dim": 32, "heads": 4, "layers": 3, "max_len": 200}
    assert kept.items() <= config.model.model_dump().items()
    assert config.training.seed == 5
    again = override_config(load_config("best-ml-1m", None, before), ["model.name=sasrec"])
    assert again == config


def test_another_model_keeps_the_stages_that_can_train_it() -> None:
    (kept,) = load_config("best-ml-1m", None, ["model.name=sasrec"]).stages
    assert kept == load_config("best-ml-1m").stages[0]  # the other one needs both directions
    assert load_config("best-ml-1m", None, ["model.name=popularity"]).stages == ()
    (own,) = load_config("best-ml-1m", None, ["model.name=cdae"]).stages
    assert own.objective == "denoising"


def test_another_loss_drops_only_the_settings_that_it_does_not_have() -> None:
    config = load_config("gru4rec+", None, ["loss.n_negatives=7", "loss.name=sampled-softmax"])
    expected = {"name": "sampled-softmax", "n_negatives": 7, "negatives": "popularity"}
    assert config.loss.model_dump() == {**expected, "power": 0.75}
    config = override_config(config, ["loss.name=cross-entropy"])
    assert config.loss.model_dump() == {"name": "cross-entropy"}


def test_another_objective_drops_only_the_settings_that_it_does_not_have() -> None:
    config = load_config("paper-beauty", None, ["stages.0.objective=last_item"])
    expected = {"objective": "last_item", "epochs": 1000, "learning_rate": 1e-4, "patience": 20}
    assert config.stages[0].model_dump() == expected
    config = load_config("demo", None, ["stages.1.objective=cloze", "stages.1.mask_ratio=0.3"])
    assert config.stages[0] == load_config("demo").stages[0]
    assert config.stages[1] == ClozeStage(epochs=4, learning_rate=1e-3, patience=10, mask_ratio=0.3)


def test_a_stage_is_left_out_by_no_epochs() -> None:
    config = load_config("demo", None, ["stages.1.epochs=0"])
    assert [stage.epochs for stage in config.stages] == [8, 0]


# Files.


def test_bad_files_and_recipes_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("[model\n")
    with pytest.raises(ValueError, match=r"broken\.toml.*TOML"):
        load_config(file=tmp_path / "broken.toml")
    with pytest.raises(ValueError, match=r"missing\.toml.*cannot be read"):
        load_config(file=tmp_path / "missing.toml")
    with pytest.raises(ValueError, match="did you mean 'paper-beauty'"):
        load_config("paper-beuty")


def test_a_configuration_cannot_be_written_to() -> None:
    config = load_config()
    with pytest.raises(ValueError, match="frozen"):
        config.model.dim = 3
    changed = override_config(config, ["evaluation.ks=[3,7]"])
    assert changed.evaluation.ks == (3, 7)
    assert config.evaluation.ks == (1, 5, 10, 20)


# Another package brings a model, a loss and an objective.

PACKAGE = '''
import torch
from bert4rec.losses import LossSettings
from bert4rec.losses import differentiate
from bert4rec.models.gru4rec import GRU4Rec, GRU4RecSettings
from bert4rec.objectives import NextItemStage

class MeanSettings(GRU4RecSettings):
    name: str = "a_package.parts:Mean"
    sharpness: float = 1.0

class Mean(GRU4Rec):
    """The mean of the items so far."""

    settings_class = MeanSettings

    def encode_queries(self, tokens, positions, users):
        x = self.item_embedding(tokens).cumsum(1) / torch.arange(1, tokens.shape[1] + 1)[:, None]
        return self.settings.sharpness * x.flatten(0, 1)[positions]

class Squared:
    is_sparse = False

    def __init__(self, margin):
        self.margin = margin

    def __call__(self, h, output, targets, *, scale, generator):
        def value(h):
            scores = output.scores(h, targets[:, None])
            return scale * ((self.margin - scores) ** 2).sum()
        return differentiate(h, value)

class SquaredSettings(LossSettings):
    name: str = "a_package.parts:SquaredSettings"
    margin: float = 1.0

    def build(self, train_counts):
        return Squared(self.margin)

class EarlyStage(NextItemStage):
    objective: str = "a_package.parts:EarlyStage"
    earliest: int = 3

    def build(self, train, model):
        objective = super().build(train, model)
        return objective._replace(draw_sequences=lambda _: objective.draw_sequences(_).take([0, 1, 2]))
'''


@pytest.fixture
def another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "site" / "a_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "parts.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(folder.parent))
    yield
    for name in ("a_package", "a_package.parts"):
        sys.modules.pop(name, None)


FOREIGN = (
    "model.name=a_package.parts:Mean",
    "model.sharpness=2",
    "loss.name=a_package.parts:SquaredSettings",
    "loss.margin=3",
    "stages.0.objective=a_package.parts:EarlyStage",
    "stages.0.earliest=2",
)


@pytest.mark.usefixtures("another_package")
def test_another_package_brings_a_model_a_loss_and_an_objective(tmp_path: Path) -> None:
    small = ("model.dim=8", "model.max_len=12", "stages.0.epochs=1", "training.workers=1")
    config = load_config(overrides=[*FOREIGN, *small])
    assert (config.model.sharpness, config.loss.margin, config.stages[0].earliest) == (2, 3, 2)
    sequences = cycle()
    options = RunOptions(baselines=False)
    outcome = train_recommender(sequences, config, tmp_path / "model", options, console=quiet())
    loaded = Recommender.load(tmp_path / "model")
    assert type(loaded.model).__name__ == "Mean"
    assert loaded.config == outcome.recommender.config
    state, again = outcome.recommender.model.state(), loaded.model.state()
    assert all(torch.equal(again[name], value) for name, value in state.items())
    found = [each.item for each in loaded.recommend(["item-1", "item-2"], k=3)]
    assert found == [each.item for each in outcome.recommender.recommend(["item-1", "item-2"], k=3)]


@pytest.mark.usefixtures("another_package")
def test_an_objective_of_another_package_trains_bert4rec_but_no_fitted_model() -> None:
    stage = {"objective": "a_package.parts:EarlyStage"}
    assert Config.parse({"stages": [stage]}, "here").stages[0].objective == stage["objective"]
    with pytest.raises(ValueError, match="only fitted"):
        Config.parse({"model": {"name": "markov"}, "stages": [stage]}, "here")


@pytest.mark.usefixtures("another_package")
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.name=a_package.parts:Median", "model.name is .*cannot be imported.*Median"),
        ("loss.name=no_package:Loss", "loss.name is .*cannot be imported.*no_package"),
        ("stages.0.objective=no_package:Stage", "objective is .*cannot be imported.*no_package"),
        ("model.wide=3", "unknown setting 'model.wide'"),
    ],
)
def test_mistakes_with_another_package_are_named(override: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_config(overrides=["model.name=a_package.parts:Mean", override])


def test_what_auto_became_is_said() -> None:
    config = load_config("default")
    assert resolved_values(config, resolve(config, 500)) == "model.output_gain = 1.0, loss.name = cross-entropy"
    many = resolved_values(config, resolve(config, 50_000))
    assert many == "model.output_gain = 4.0, loss.name = sampled-softmax"
    named = load_config("bert4rec")
    assert resolved_values(named, resolve(named, 500)) == ""
