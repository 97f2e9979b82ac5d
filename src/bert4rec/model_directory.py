"""A model on disk: a directory that is whole or refused.

`config.json`, `model.safetensors`, `items.parquet`, `about.json`, the index of a large catalogue,
and `manifest.json`, written last, with the SHA-256 of each. Its evaluation lies beside them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from bert4rec.config import RunConfig
from bert4rec.data.sequences import Vocabulary
from bert4rec.durable import MANIFEST, new_file, verify_manifest, write_file, write_manifest
from bert4rec.models import MODELS, Model
from bert4rec.retrieval.item_index import (
    ItemIndex,
    delete_other_indexes,
    has_faiss,
    index_name,
    note_missing_faiss,
    read_index,
    write_index,
)
from bert4rec.scoring import dot_product_of

FORMAT_VERSION = 3
FILES = ("about.json", "config.json", "model.safetensors", "items.parquet")  # a whole model
FINITE_AT_ONCE = 2**24  # numbers that are looked at together, so that checking takes no memory


class SavedModel(NamedTuple):
    model: Model
    vocabulary: Vocabulary
    config: RunConfig
    about: dict[str, Any]
    item_index: ItemIndex | None


def save_model(directory: Path, saved: SavedModel) -> None:
    """Write the model's files; the manifest comes last, so that half a model is refused."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MANIFEST).unlink(missing_ok=True)
    about = saved.about | {
        "format_version": FORMAT_VERSION,
        "n_items": len(saved.vocabulary),
        "item_id_type": saved.vocabulary.id_type,
    }
    write_file(directory / "about.json", json.dumps(about, indent=2))
    write_file(directory / "config.json", saved.config.model_dump_json(indent=2))
    tensors = {name: tensor.contiguous() for name, tensor in saved.model.state().items()}
    with new_file(directory / "model.safetensors") as path:
        save_file(tensors, path)
    with new_file(directory / "items.parquet") as path:
        saved.vocabulary.save(path)
    save_index(directory, saved.item_index)


def save_index(directory: Path, index: ItemIndex | None) -> None:
    """Write the index, or take it away, of a model that is in this directory already."""
    names = () if index is None else write_index(directory, index)
    write_manifest(directory, (*FILES, *names))
    delete_other_indexes(directory, names)


def load_model(directory: Path, *, with_index: bool) -> SavedModel:
    """A saved model; a ValueError says what is wrong with one that cannot be trusted."""
    try:
        return _load(directory, with_index=with_index)
    except FileNotFoundError as error:
        raise ValueError(f"{directory} was being replaced: load it again ({error.filename} is gone)") from None


def _load(directory: Path, *, with_index: bool) -> SavedModel:
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory: train a model there first")
    if not (directory / MANIFEST).exists() and (directory / "checkpoints").is_dir():
        raise ValueError(
            f"{directory} holds a training that is not finished: "
            "run the same `bert4rec train` command again with --resume"
        )
    verify_manifest(directory)
    about = json.loads((directory / "about.json").read_text(encoding="utf-8"))
    if about["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{directory} has model format {about['format_version']}, this program reads "
            f"{FORMAT_VERSION}: install the bert4rec version that wrote it, or train again"
        )
    settings = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config = RunConfig.parse(settings, str(directory / "config.json"))
    vocabulary = Vocabulary.load(directory / "items.parquet", about["item_id_type"])
    tensors = _read_tensors(directory / "model.safetensors")
    model = MODELS[config.model.name].restore(tensors, config.model, len(vocabulary))
    index = _load_index(directory, model) if with_index else None
    return SavedModel(model, vocabulary, config, about, index)


def _load_index(directory: Path, model: Model) -> ItemIndex | None:
    name = index_name(directory)
    if name is None:
        return None
    output = dot_product_of(model)
    if output is None:
        raise ValueError(f"{directory / name} is the index of another model: save it again")
    if has_faiss():
        return read_index(directory, name, output)
    note_missing_faiss()
    return None


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors = load(path.read_bytes())
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: it is not a safetensors file ({error})") from None
    for name, tensor in tensors.items():
        parts = torch.split(tensor.flatten(), FINITE_AT_ONCE)
        if not all(bool(part.isfinite().all()) for part in parts):
            raise ValueError(f"{path} is damaged: {name} holds values that are not numbers")
    return tensors
