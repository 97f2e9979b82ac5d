"""How many epochs fit into a time budget, computed before training.

A run that a clock stopped could not be repeated bit for bit, and its learning rate would be cut off
in mid-decay. So a throw-away copy of the model is trained for a few seconds, and the time of its
steps becomes a number of epochs: an ordinary setting, which a resumed or repeated run reads. The
learning rate then reaches zero at the end of what fits.

A machine may become slower than it was while timing, so a run is also stopped at `HARD_STOP` times
its budget. Models that are fitted in one pass have no epochs: a budget does not
apply to them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from bert4rec.config import RunConfig
from bert4rec.cpu_tuning import keep_freed_memory
from bert4rec.data.splits import Split
from bert4rec.training.memory import available_memory, check_memory
from bert4rec.training.timing import StageTime, time_stages

HARD_STOP = 1.3  # times the budget
MARGIN = 1.05  # the estimate is assumed to be this much too low
LATER_STAGES = 0.3  # share of the budget for all stages after the first
MOST_VALIDATING = 0.15  # share of the time
WANTED_VALIDATIONS = 8  # per run, when there is time for them
TIMING_SECONDS = 5.0  # at most
TIMING_SHARE = 0.025  # of the budget, for timing


def fit_budget(split: Split, config: RunConfig, minutes: float) -> tuple[RunConfig, float]:
    """`config` with as many epochs as fit into `minutes`, at most those that it had; the seconds they take."""
    if not config.stages:
        return config, 0.0
    longest = int(split.train.lengths.max())
    check_memory(config, split.n_items, longest, available_memory())
    keep_freed_memory()  # as in training: without it a step takes longer
    seconds = min(TIMING_SECONDS, TIMING_SHARE * 60 * minutes)
    return epochs_that_fit(config, time_stages(split, config, seconds), minutes)


def epochs_that_fit(config: RunConfig, times: Sequence[StageTime], minutes: float) -> tuple[RunConfig, float]:
    """The numbers of epochs and validations that fill `minutes`, given the time of each stage; the seconds in all.

    The first stage gets 70 % of the budget and the later ones share 30 %; what a stage does not
    need is left to those after it.
    """
    budget = 60 * minutes / MARGIN
    epoch = [each.seconds_per_epoch for each in times]
    validation = [each.seconds_per_validation for each in times]
    shortest = epoch[0] + validation[0]
    if shortest > HARD_STOP * 60 * minutes:
        raise ValueError(
            f"the budget is {minutes:.3g} minutes, and one pass over the training data takes about "
            f"{shortest / 60:.2g}: give it more time with --budget, or train on less data"
        )
    n_later = len(times) - 1
    shares = [1 - LATER_STAGES if n_later else 1.0] + [LATER_STAGES / max(n_later, 1)] * n_later
    stages = [stage for stage in config.stages if stage.epochs]
    assert len(stages) == len(times)
    every = _validate_every(
        config.training.validate_every,
        min(stages[0].epochs, max(1, int(budget * shares[0] / epoch[0]))),
        epoch[0],
        validation[0],
    )
    fitted, total = [], 0.0
    for place, stage in enumerate(stages):
        left = max(budget * shares[place], (budget - total) / (len(stages) - place))
        # The last validation may come after fewer than `every` epochs: its time is set aside.
        each = epoch[place] + validation[place] / every
        n_epochs = min(stage.epochs, max(1, int((left - validation[place]) / each)))
        total += n_epochs * epoch[place] + math.ceil(n_epochs / every) * validation[place]
        fitted.append(stage.model_copy(update={"epochs": n_epochs}))
    training = config.training.model_copy(update={"validate_every": every})
    update = {"stages": tuple(fitted), "training": training}
    return config.model_copy(update=update), total


def _validate_every(wanted: int, n_epochs: int, epoch: float, validation: float) -> int:
    """Epochs between validations: often enough to choose the best, and not too expensive."""
    every = min(wanted, max(1, n_epochs // WANTED_VALIDATIONS))
    affordable = validation * (1 - MOST_VALIDATING) / (MOST_VALIDATING * epoch)
    return min(max(every, math.ceil(affordable)), n_epochs)


def parse_budget(text: str, option: str = "--budget") -> float:
    """Minutes of `90s`, `20m`, `1h` or `1h30m`."""
    number = r"(\d+(?:\.\d+)?)"
    parts = re.fullmatch(f"(?:{number}h)?(?:{number}m)?(?:{number}s)?", text.strip())
    hours, minutes, seconds = (float(part or 0) for part in parts.groups()) if parts else (0.0,) * 3
    total = 60 * hours + minutes + seconds / 60
    if not total:
        raise ValueError(f"{option} is {text!r}: write a time as in 90s, 20m, 1h or 1h30m")
    return total
