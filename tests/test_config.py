"""Settings: what is merged, and how a mistake is answered."""

from pathlib import Path

import pytest

from bert4rec.config import load_config, override_config, recipe_names, setting_descriptions


def test_every_recipe_is_valid() -> None:
    for name in recipe_names():
        load_config(name)
    papers = {"paper-ml-1m", "paper-beauty", "paper-steam", "paper-ml-20m"}
    assert papers | {"default", "demo"} <= set(recipe_names())


def test_every_setting_is_described() -> None:
    described = {name: meaning for name, _, meaning in setting_descriptions()}
    assert described["training.mask_ratio"].startswith("rho")
    assert all(described.values())


def test_the_papers_settings() -> None:
    config = load_config("paper-beauty")
    assert (config.model.dim, config.model.heads, config.model.max_len) == (256, 8, 50)
    assert (config.training.mask_ratio, config.training.learning_rate) == (0.6, 1e-4)
    assert config.training.weight_decay == 0.01
    assert config.second_stage.epochs == 0


def test_file_goes_over_recipe_and_set_over_both(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[model]\ndim = 32\n[training]\nepochs = 7\n")
    config = load_config("default", file, ["training.epochs=9", "data.split=global-time"])
    assert (config.model.dim, config.training.epochs) == (32, 9)
    assert config.data.split == "global-time"
    assert config.model.layers == 2  # the recipe's


def test_a_short_name_is_enough_where_it_is_clear() -> None:
    config = load_config(overrides=["max_len=50", "epochs=3", "patience=null"])
    assert (config.model.max_len, config.training.epochs, config.training.patience) == (50, 3, None)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["training.epoch=3"], ["training.epoch", "did you mean 'epochs'"]),
        (["dims=3"], ["dims", "did you mean"]),
        (["trainig.epochs=3"], ["trainig", "training"]),
        (["training.epochs=many"], ["training.epochs", "'many'", "integer"]),
        (["training.mask_ratio=1.5"], ["training.mask_ratio", "1.5"]),
        (["model.heads=3"], ["heads = 3", "dim = 64"]),
        (["epochs"], ["section.key=value"]),
        (["training.learning_rate=NaN"], ["training.learning_rate", "finite"]),
        (["n_negatives=9"], ["training.n_negatives", "auto", "training.loss=sampled-softmax"]),
    ],
)
def test_mistakes_name_the_setting_and_the_remedy(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r".+") as error:
        load_config(overrides=overrides)
    for word in words:
        assert word in str(error.value)


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
        config.model.dim = 3  # type: ignore[misc]
    changed = override_config(config, ["evaluation.ks=[3,7]"])
    assert changed.evaluation.ks == (3, 7)
    assert config.evaluation.ks == (1, 5, 10, 20)
