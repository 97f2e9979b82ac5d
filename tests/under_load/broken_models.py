"""Ways in which the directory of a model can be broken, each of which must be refused.

Most have a right manifest: a checksum proves that files were copied well, not that they are any
good.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from served import save_model

from bert4rec.data.sequences import Vocabulary
from bert4rec.durable import MANIFEST, write_manifest
from bert4rec.model_directory import FILES
from bert4rec.models.bpr_mf import BPRMF
from bert4rec.recommender import Recommender

WEIGHTS = "model.safetensors"


def truncated_weights(directory: Path) -> None:
    path = directory / WEIGHTS
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def one_changed_byte(directory: Path) -> None:
    content = bytearray((directory / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (directory / WEIGHTS).write_bytes(content)


def no_manifest(directory: Path) -> None:
    (directory / MANIFEST).unlink()


def manifest_of_nothing(directory: Path) -> None:
    (directory / MANIFEST).write_text('{"files": {}}')
    (directory / WEIGHTS).unlink()


def manifest_not_json(directory: Path) -> None:
    (directory / MANIFEST).write_text("{")


def empty_directory(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


def not_a_directory(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.write_text("a file")


def nothing_there(directory: Path) -> None:
    shutil.rmtree(directory)


def nan_weights(directory: Path) -> None:
    _with_weights(directory, lambda weights: weights["output_projection.weight"].fill_(float("nan")))


def scores_without_end(directory: Path) -> None:
    """Every weight is a number, and the products of them are not."""
    _with_weights(directory, lambda weights: [each.fill_(3e38) for each in weights.values()])


def wrong_shapes(directory: Path) -> None:
    _with_weights(directory, lambda weights: weights.update({"output_projection.weight": torch.zeros(3, 3)}))


def missing_weight(directory: Path) -> None:
    _with_weights(directory, lambda weights: weights.pop("output_projection.weight"))


def weights_of_text(directory: Path) -> None:
    (directory / WEIGHTS).write_text("never weights")
    write_manifest(directory, FILES)


def unknown_model(directory: Path) -> None:
    _with_json(directory, "config.json", lambda config: config["model"].update(name="clairvoyant"))


def unknown_setting(directory: Path) -> None:
    _with_json(directory, "config.json", lambda config: config["model"].update(speed="high"))


def config_is_a_list(directory: Path) -> None:
    (directory / "config.json").write_text("[]")
    write_manifest(directory, FILES)


def longer_than_its_positions(directory: Path) -> None:
    _with_json(directory, "config.json", lambda config: config["model"].update(max_len=80))


def about_is_a_list(directory: Path) -> None:
    (directory / "about.json").write_text("[]")
    write_manifest(directory, FILES)


def about_without_id_type(directory: Path) -> None:
    _with_json(directory, "about.json", lambda about: about.pop("item_id_type"))


def another_format(directory: Path) -> None:
    _with_json(directory, "about.json", lambda about: about.update(format_version=99))


def fewer_items(directory: Path) -> None:
    path = directory / "items.parquet"
    whole = Vocabulary.load(path, "str")
    Vocabulary(whole.ids[:-1], whole.counts[:-1], None).save(path)
    write_manifest(directory, FILES)


def items_are_text(directory: Path) -> None:
    (directory / "items.parquet").write_text("never a table")
    write_manifest(directory, FILES)


def users_only(directory: Path) -> None:
    whole = Recommender.load(directory)
    settings = whole.config.model.model_copy(update={"name": "bpr-mf"})
    config = whole.config.model_copy(update={"model": settings})
    n_items = len(whole.vocabulary)
    model = BPRMF(torch.ones(4, 9), torch.ones(n_items, 9), torch.ones(4, dtype=torch.bool))
    Recommender(model, whole.vocabulary, config, whole.about).save(directory)


BROKEN: dict[str, Callable[[Path], None]] = {
    way.__name__.replace("_", " "): way
    for way in (
        nan_weights,
        items_are_text,
        truncated_weights,
        users_only,
        empty_directory,
        wrong_shapes,
        another_format,
        no_manifest,
        one_changed_byte,
        unknown_model,
        fewer_items,
        scores_without_end,
        missing_weight,
        manifest_of_nothing,
        weights_of_text,
        manifest_not_json,
        unknown_setting,
        not_a_directory,
        config_is_a_list,
        nothing_there,
        longer_than_its_positions,
        about_is_a_list,
        about_without_id_type,
    )
}


def make_broken(directory: Path, way: str, seed: int) -> None:
    save_model(directory, seed=seed)
    BROKEN[way](directory)


def _with_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(directory / WEIGHTS)
    change(weights)
    save_file(weights, directory / WEIGHTS)
    write_manifest(directory, FILES)


def _with_json(directory: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((directory / name).read_text())
    change(content)
    (directory / name).write_text(json.dumps(content))
    write_manifest(directory, FILES)
