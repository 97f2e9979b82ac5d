"""What `training.loss = auto` stands for, once it is known how many items there are."""

from __future__ import annotations

from bert4rec.config import Config, override_config

LARGE = 20_000  # items from which on the softmax over all of them takes most of a training
SAMPLED = (
    "training.loss=sampled-softmax",
    "training.negatives=popularity",
    "training.n_negatives=2048",
)
SHARP = "model.head_gain=4"  # a softmax over many items that starts even learns slowly


def settled(config: Config, n_items: int) -> Config:
    """The same settings without `auto`: what is trained with, and what the model keeps."""
    if config.training.loss != "auto":
        return config
    if n_items < LARGE:
        return override_config(config, ["training.loss=cross-entropy"])
    model = config.model
    starts_even = model.name == "bert4rec" and model.head_norm and model.head_gain == 1
    return override_config(config, [*SAMPLED, *([SHARP] if starts_even else [])])
