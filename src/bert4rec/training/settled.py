"""What `training.loss = auto` stands for, once it is known how many items there are."""

from __future__ import annotations

from bert4rec.config import Config, override_config

LARGE = 20_000  # items from which on the softmax over all of them takes most of a training


def settled(config: Config, n_items: int) -> Config:
    """The same settings without `auto`: what is trained with, and what the model keeps."""
    if config.training.loss != "auto":
        return config
    loss = "cross-entropy" if n_items < LARGE else "sampled-softmax"
    return override_config(config, [f"training.loss={loss}"])
