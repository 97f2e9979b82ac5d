"""How much memory a training run will need, before it starts.

An estimate from the shapes alone. What autograd keeps is that of the Transformer; other models keep
less.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from bert4rec.config import RunConfig, override_config, resolve
from bert4rec.losses import uses_sparse_gradient
from bert4rec.losses.cross_entropy import LOGITS_BYTES
from bert4rec.losses.sampled import AT_ONCE, SampledSettings
from bert4rec.models.sequence_model import SequenceModelSettings
from bert4rec.objectives import ClozeStage
from bert4rec.scoring import SCORES_BYTES
from bert4rec.threads import default_workers
from bert4rec.training.setup import build_model, trained_class

FLOAT = 4
GIB = 2**30
VALIDATION_ROWS = 256
# Numbers that autograd keeps per position and unit of width, in each block: the input, q, k, v, the
# mixture, the projections, sums, norms and dropout, and three arrays of the fourfold inner layer.
KEPT_PER_BLOCK = 26
KEPT_BESIDE_BLOCKS = 4


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one process."""

    parameters: int  # twice: the best ones are kept aside
    optimizer: int  # a gradient per worker, and AdamW's two moments
    batch: int  # what the workers hold for their microbatches, or for a validation
    process: int = 400 * 2**20  # Python, torch and the data that is mapped
    whole: int = 0  # for the first process, when it assembles sharded items

    @property
    def total(self) -> int:
        training = self.parameters + self.optimizer + self.batch
        return max(training, self.whole) + self.process

    def __str__(self) -> str:
        return (
            f"memory estimate: {_size(self.total)} = parameters {_size(self.parameters)} + "
            f"optimizer {_size(self.optimizer)} + largest batch {_size(self.batch)} + process "
            f"{_size(self.process)}"
        )


def estimate_memory(
    config: RunConfig, n_items: int, longest: int, n_users: int = 0, n_processes: int = 1
) -> MemoryEstimate:
    """For one process; `longest` is the longest training history."""
    model, training = config.model, config.training
    assert isinstance(model, SequenceModelSettings)
    n_workers = training.workers or default_workers()
    with torch.device("meta"):  # shapes only, no memory
        parameters = build_model(config, n_items, n_users).parameters()
    n_parameters, whole = sum(parameter.numel() for parameter in parameters), 0
    if training.shard_items:
        n_sharded = n_items * (model.dim + 1)
        n_parameters += n_sharded // n_processes - n_sharded
        whole = (n_sharded + n_sharded // n_processes) * FLOAT
    length = min(model.max_len, longest)
    # A worker holds one microbatch at a time.
    largest = max(trained_class(config).microbatch.positions, length)
    positions = min(training.batch_size * length, largest)
    if config.loss.name == "cross-entropy":
        n_queries = int(positions * _query_share(config)) + 1
        loss = min(LOGITS_BYTES, n_queries * n_items * FLOAT)
        gradients = n_workers * n_parameters * FLOAT
    else:  # the gradient is sparse: rows of the microbatch, the targets and the negatives
        n_negatives = config.loss.n_negatives if isinstance(config.loss, SampledSettings) else 1024
        n_scores = min(n_negatives * positions, AT_ONCE)
        loss = (3 * n_scores + 4 * positions * model.dim) * FLOAT
        n_dense = n_parameters // 10 if uses_sparse_gradient(n_items) else n_workers * n_parameters
        gradients = n_dense * FLOAT
    scores = min(max(SCORES_BYTES, n_items * FLOAT), VALIDATION_ROWS * n_items * FLOAT)
    validation = 2 * scores  # and comparisons with them
    step = int(1.3 * _kept_for_backward(config, positions, length)) + loss
    return MemoryEstimate(
        parameters=2 * n_parameters * FLOAT,
        optimizer=2 * n_parameters * FLOAT + gradients,
        batch=n_workers * max(step, validation),
        whole=whole,
    )


def _kept_for_backward(config: RunConfig, positions: int, length: int) -> int:
    """Bytes that autograd keeps of a microbatch."""
    model = config.model
    assert isinstance(model, SequenceModelSettings)
    layers = getattr(model, "layers", 1)
    kept = positions * model.dim * (KEPT_BESIDE_BLOCKS + layers * KEPT_PER_BLOCK) * FLOAT
    objectives = {stage.objective for stage in config.stages if stage.epochs}
    if trained_class(config).has_mask and "next_item" in objectives:
        kept *= 2  # as many [MASK]s as items
    if getattr(model, "attention_dropout", 0):
        # There is no fused kernel for it: scores, probabilities, mask and product are kept.
        kept += layers * 4 * positions * length * getattr(model, "heads", 1) * FLOAT
    return kept


def _query_share(config: RunConfig) -> float:
    """The largest share of the positions that are queries, in any stage."""
    stages = [stage for stage in config.stages if stage.epochs and stage.objective != "last_item"]
    ratios = [stage.mask_ratio if isinstance(stage, ClozeStage) else 1.0 for stage in stages]
    return max(ratios, default=1.0)


def check_memory(
    config: RunConfig, n_items: int, longest: int, available: int | None, n_users: int = 0, n_processes: int = 1
) -> MemoryEstimate:
    """The estimate; a ValueError that says which settings would fit when this one does not."""
    estimate = estimate_memory(config, n_items, longest, n_users, n_processes)
    if available is None or estimate.total <= available:
        return estimate

    def fits(change: str) -> bool:
        try:
            changed = resolve(override_config(config, [change]), n_items)
        except ValueError:  # a width that the heads do not divide
            return False
        return estimate_memory(changed, n_items, longest, n_users, n_processes).total <= available

    assert isinstance(config.model, SequenceModelSettings)
    halved = {
        "training.workers": _halves(config.training.workers or default_workers(), 1),
        "training.batch_size": _halves(config.training.batch_size, 1),
        "model.max_len": _halves(config.model.max_len, 10),
        "model.dim": _halves(config.model.dim, 8),
        "model.attention_dropout": [0] if getattr(config.model, "attention_dropout", 0) else [],
    }
    changes = ([f"{name}={value}" for value in values] for name, values in halved.items())
    ideas = [f"--set {idea}" for each in changes if (idea := next(filter(fits, each), None))]
    advice = f"Each of these alone would fit: {', '.join(ideas)}."
    if not ideas:
        advice = "No smaller setting alone fits: drop rare items (--set data.min_item_actions=5)."
    raise ValueError(
        f"this run needs about {_size(estimate.total)} of memory and {_size(available)} are free. {estimate}. {advice}"
    )


def _halves(value: int, smallest: int) -> list[int]:
    """Half of it, a quarter, and so on."""
    halves = (value >> n for n in range(1, value.bit_length()))
    return [half for half in halves if half >= smallest]


def available_memory(n_processes: int = 1) -> int | None:
    """Bytes that each of them may still take: free memory, or a container's limit if lower."""
    limits = []
    meminfo, container = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    if meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    elif "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):  # no such files, or the limit is `max`
        limit, used = (int((container / f"memory.{name}").read_text()) for name in ("max", "current"))
        statistics = dict(line.split() for line in (container / "memory.stat").read_text().splitlines())
        # File pages that the kernel would give up count as free.
        limits.append(limit - used + int(statistics.get("inactive_file", 0)))
    return min(limits) // n_processes if limits else None


def _size(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.2f} GiB" if n_bytes >= GIB / 10 else f"{n_bytes / 2**20:.0f} MiB"
