"""What `training.loss = auto` stands for, once it is known how many items there are."""

from __future__ import annotations

from bert4rec.config import Config, override_config

MANY = 10_000  # items from which on a softmax that starts even learns slowly
LARGE = 20_000  # items from which on the softmax over all of them takes most of a training
SAMPLED = (
    "training.loss=sampled-softmax",
    "training.negatives=popularity",
    "training.n_negatives=2048",
)
FULL = ("training.loss=cross-entropy",)
SHARP = ("model.head_gain=4",)


def settled(config: Config, n_items: int) -> Config:
    """The same settings without `auto`: what is trained with, and what the model keeps."""
    if config.training.loss != "auto":
        return config
    model = config.model
    starts_even = model.name == "bert4rec" and model.head_norm and model.head_gain == 1
    loss = SAMPLED if n_items >= LARGE else FULL
    gain = SHARP if n_items >= MANY and starts_even else ()
    return override_config(config, [*loss, *gain])
