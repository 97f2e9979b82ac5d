"""From a resolved configuration to the loop that trains it: stages, batches, loss."""

from __future__ import annotations

from dataclasses import replace

import torch

from bert4rec.config import RunConfig
from bert4rec.data.splits import HeldOut, Split
from bert4rec.models import MODELS, is_trained
from bert4rec.models.initialization import popularity_bias
from bert4rec.models.sequence_model import SequenceModel, SequenceModelSettings
from bert4rec.objectives import ModelSpec
from bert4rec.training.batches import Sizes, StageBatches, users_of_shard
from bert4rec.training.loop import TrainingStage
from bert4rec.training.process_group import SINGLE_PROCESS, ProcessGroup


def trained_class(config: RunConfig) -> type[SequenceModel]:
    model = MODELS[config.model.name]
    assert is_trained(model)
    return model


def build_model(config: RunConfig, n_items: int, n_users: int) -> SequenceModel:
    """The model before training; the same for the same seed."""
    torch.manual_seed(config.training.seed)
    return trained_class(config)(n_items, config.model, n_users)


def training_split(split: Split, config: RunConfig) -> Split:
    """The split that is trained on: with the validation items, if the settings say so."""
    return split.training_on_validation() if config.training.on_validation else split


def initial_output_bias(config: RunConfig, split: Split) -> torch.Tensor | None:
    """(V,) of models whose settings want another one than zero."""
    if getattr(config.model, "output_bias", "zero") == "zero":
        return None
    return popularity_bias(split.train_counts)


def build_stages(
    config: RunConfig, split: Split, n_workers: int, group: ProcessGroup = SINGLE_PROCESS, n_shards: int = 1
) -> list[TrainingStage]:
    """The stages that have epochs, with the batches of this process's shards of the users."""
    model, shards = trained_class(config), range(group.rank, n_shards, group.n)
    assert isinstance(config.model, SequenceModelSettings)
    shape = ModelSpec(split.n_items, config.model.max_len, model.has_mask, getattr(config.model, "n_targets", 1))
    settings = [stage for stage in config.stages if stage.epochs]
    names = stage_names(config)
    stages = []
    for number, (name, stage) in enumerate(zip(names, settings, strict=True)):
        objectives = {shard: stage.build(users_of_shard(split.train, shard, n_shards), shape) for shard in shards}
        batches = StageBatches(
            objectives,
            (config.training.seed, number),
            split.n_items,
            config.training.batch_size,
            Sizes(model.microbatch, n_workers),
            group,
        )
        if number == 0 and batches.steps_per_epoch == 0:
            raise ValueError(
                "no history is long enough to train on: the model needs users with two or more "
                "actions in the training part; use more data or weaker filters"
            )
        stages.append(TrainingStage(name, stage, batches))
    return stages


def stage_names(config: RunConfig) -> list[str]:
    """As the log has them: the objective, with a number where it occurs twice."""
    objectives = [stage.objective for stage in config.stages if stage.epochs]
    names = []
    for place, objective in enumerate(objectives):
        n_before = objectives[:place].count(objective)
        names.append(f"{objective} {n_before + 1}" if objectives.count(objective) > 1 else objective)
    return names


def validation_users(split: Split, config: RunConfig) -> HeldOut | None:
    """Those whose items choose the best weights; None where they are trained on."""
    if config.training.on_validation:
        return None
    n = config.training.validation_users
    return split.validation if n is None else split.validation.sample(n, config.training.seed)


def without_test(split: Split) -> Split:
    """For whoever chooses settings: the test items are not to be read."""
    return replace(split, test=split.validation)
