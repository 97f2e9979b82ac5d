"""An index beside its model: `index-….safetensors`, and `index-….json` with its recall.

Their names follow from their content, and the manifest says which of them count: a new index is
there when the new manifest is, all at once, whoever reads the directory meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from bert4rec.durable import MANIFEST, write_file
from bert4rec.models.output import ItemProducts
from bert4rec.retrieval.item_index import RECALL_AT, IndexQuality, IndexTensors, ItemIndex

FORMAT_VERSION = 1


def write_index(directory: Path, index: ItemIndex) -> tuple[str, str]:
    """The names of the two files, for the manifest."""
    tensors = save({"centroids": index.tensors.centroids, "lists": index.tensors.lists})
    facts = {"format_version": FORMAT_VERSION, "kind": "ivf"} | asdict(index.quality)
    text = json.dumps(facts, indent=2)
    name = f"index-{hashlib.sha256(tensors + text.encode()).hexdigest()[:12]}"
    write_file(directory / f"{name}.safetensors", tensors)
    write_file(directory / f"{name}.json", text)
    return f"{name}.safetensors", f"{name}.json"


def index_name(directory: Path) -> str | None:
    """Of the index that the manifest vouches for, without its endings; None if there is none."""
    manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    names = {Path(name).stem for name in manifest["files"] if name.startswith("index-")}
    return next(iter(names), None)


def read_index(directory: Path, name: str, output: ItemProducts) -> ItemIndex:
    """From a directory whose manifest was verified."""
    facts = json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))
    try:
        is_ours = (facts.pop("format_version"), facts.pop("kind")) == (FORMAT_VERSION, "ivf")
        quality = IndexQuality(**facts)
    except (AttributeError, KeyError, TypeError):
        is_ours = False
    if not is_ours:
        raise ValueError(f"{directory / name}.json is of another version of bert4rec: run `bert4rec index` again")
    path = directory / f"{name}.safetensors"
    try:
        loaded = load(path.read_bytes())
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: it is not a safetensors file ({error})") from None
    empty = torch.empty(0)
    tensors = IndexTensors(loaded.get("centroids", empty), loaded.get("lists", empty))
    tensors.check(output)
    if not _are_possible(quality, len(tensors.centroids)):
        raise ValueError(
            f"{directory / name}.json is damaged: it says what no index can be; run `bert4rec index` again"
        )
    return ItemIndex(tensors, output, quality)


def _are_possible(facts: IndexQuality, n_lists: int) -> bool:
    counts = facts.n_lists, facts.n_searched, facts.n_tuned, facts.n_measured
    numbers = facts.target, facts.recall, facts.seconds, facts.depth
    return (
        all(type(count) is int for count in counts)
        and all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
        and 1 <= facts.n_searched <= facts.n_lists == n_lists
        and 0 <= facts.recall <= 1
        and facts.depth >= RECALL_AT
    )


def delete_other_indexes(directory: Path, kept: Iterable[str] = ()) -> None:
    """What an earlier manifest vouched for."""
    for path in directory.glob("index-*"):
        if path.name not in kept and path.suffix in (".json", ".safetensors"):
            path.unlink(missing_ok=True)
