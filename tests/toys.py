"""Small data sets and models that several tests build on."""

import io
from typing import TypeVar

import numpy as np
import torch
from rich.console import Console
from torch import nn

from bert4rec.config import RunConfig, load_config, resolve
from bert4rec.data.sequences import Sequences, Vocabulary
from bert4rec.recommender import Recommender
from bert4rec.training.setup import build_model

AnyModule = TypeVar("AnyModule", bound=nn.Module)
SIZES = {"dim": 16, "max_len": 12}  # of the models that have such
SMALL = ("training.batch_size=16", "training.validation_users=50")


def small_config(*overrides: str, recipe: str = "bert4rec-2-stage") -> RunConfig:
    """The paper's network and both of its stages, or another recipe, at a size for small data."""
    fields = type(load_config(recipe).model).model_fields
    sizes = [f"model.{name}={size}" for name, size in SIZES.items() if name in fields]
    return resolve(load_config(recipe, None, [*sizes, *SMALL, *overrides]), n_items=100)


def small_run(*overrides: str, n_items: int = 30) -> RunConfig:
    """The same for this many items, with dropout and windows over long histories."""
    extra = ("model.dropout=0.2", "stages.0.window_stride=0.5")
    sizes = [f"model.{name}={size}" for name, size in SIZES.items()]
    config = load_config("bert4rec-2-stage", None, [*sizes, *SMALL, *extra, *overrides])
    return resolve(config, n_items)


def sequences_of(histories: list[list[int]], n_items: int, times: bool = False) -> Sequences:
    tokens = np.array([token for history in histories for token in history], dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum([len(history) for history in histories])])
    counts = np.bincount(tokens, minlength=n_items)
    vocabulary = Vocabulary(
        [f"item-{token}" for token in range(n_items)], counts, [f"Title {token}" for token in range(n_items)]
    )
    users = [f"user-{row}" for row in range(len(histories))]
    moments = np.arange(len(tokens), dtype=np.int64) * 1_000_000 if times else None
    return Sequences(tokens, offsets.astype(np.int64), vocabulary, users, times=moments)


def cycle(n_users: int = 120, n_items: int = 8) -> Sequences:
    """a → b → c → … → a: the next item follows from the last one alone.

    Lengths vary, so that every query position was trained on.
    """
    lengths = [5 + user % 13 for user in range(n_users)]
    histories = [[(user + i) % n_items for i in range(n)] for user, n in enumerate(lengths)]
    return sequences_of(histories, n_items)


def random_histories(seed: int, n_users: int = 40, n_items: int = 30) -> Sequences:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 25, n_users)
    return sequences_of([generator.integers(0, n_items, length).tolist() for length in lengths], n_items)


def untrained_recommender(n_items: int = 30, seed: int = 0, spread: float = 1.0) -> Recommender:
    """A model with random weights, large enough to give clearly different scores."""
    config = small_run(f"seed={seed}", n_items=n_items)
    model = randomize(build_model(config, n_items, n_users=0), spread)
    vocabulary = sequences_of([list(range(n_items))], n_items).vocabulary
    return Recommender(model, vocabulary, config, {"data": {"fingerprint": "none"}})


def randomize(model: AnyModule, spread: float) -> AnyModule:
    """The model in eval mode, every parameter drawn from a normal distribution."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=spread)
    return model.eval()


def quiet() -> Console:
    return Console(file=io.StringIO(), force_terminal=False)
