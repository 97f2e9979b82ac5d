"""How much memory a training run will need, before it starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from bert4rec.config import RunConfig, override_config, resolve
from bert4rec.losses import uses_sparse_gradient
from bert4rec.losses.cross_entropy import LOGITS_BYTES
from bert4rec.losses.sampled import AT_ONCE, SampledSettings
from bert4rec.models import MODELS, is_trained
from bert4rec.models.sequence_model import SequenceModel, SequenceModelSettings
from bert4rec.objectives import ClozeStage
from bert4rec.scoring import SCORES_BYTES
from bert4rec.threads import default_workers

FLOAT = 4
GIB = 2**30
VALIDATION_ROWS = 256


@dataclass(frozen=True)
class MemoryEstimate:
    parameters: int  # bytes, as all of these; twice, as the best ones are kept aside
    optimizer: int  # a gradient for each worker, and AdamW's two moments
    batch: int  # what the workers hold for the microbatches they compute, or a validation
    process: int = 400 * 2**20  # Python, torch and the data that is mapped
    whole: int = 0  # at the end of a training with sharded items, for the first process

    @property
    def total(self) -> int:
        training = self.parameters + self.optimizer + self.batch
        return max(training, self.whole) + self.process

    def __str__(self) -> str:
        return (
            f"memory estimate: {_size(self.total)} = parameters {_size(self.parameters)} + optimiser "
            f"{_size(self.optimizer)} + largest batch {_size(self.batch)} + process "
            f"{_size(self.process)}"
        )


def estimate_memory(
    config: RunConfig, n_items: int, longest: int, n_users: int = 0, n_processes: int = 1
) -> MemoryEstimate:
    """An estimate for one process from the shapes; `longest` is the longest training history.

    What is kept between the passes is that of the Transformer; other models keep less.
    """
    model, training = config.model, config.training
    assert isinstance(model, SequenceModelSettings)
    model_class = _class_of(config)
    length = min(model.max_len, longest)
    n_workers = training.workers or default_workers()
    n_parameters = _n_parameters(config, n_items, n_users)
    whole = 0
    if training.shard_items:
        n_rows = n_items * (model.dim + 1)
        n_parameters += n_rows // n_processes - n_rows
        whole = (n_rows + n_rows // n_processes) * FLOAT
    # A worker holds one microbatch at a time.
    at_once = model_class.microbatch.positions
    positions = min(training.batch_size * length, max(at_once, length))
    # What autograd keeps per position and block, in widths of dim: the input, q, k, v, the mixture,
    # the projections, sums, norms and dropout, and three arrays of the fourfold inner layer.
    layers = getattr(model, "layers", 1)
    kept = positions * model.dim * (4 + layers * 26) * FLOAT
    has_mask_per_item = model_class.has_mask and any(
        stage.objective == "next_item" for stage in config.stages
    )
    if has_mask_per_item:
        kept *= 2
    if getattr(
        model, "attention_dropout", 0
    ):  # no fused kernel: scores, probabilities, mask and product are kept
        kept += layers * 4 * positions * length * getattr(model, "heads", 1) * FLOAT
    scores = min(max(SCORES_BYTES, n_items * FLOAT), VALIDATION_ROWS * n_items * FLOAT)
    validation = 2 * scores  # and comparisons with them
    if config.loss.name == "cross-entropy":
        ratios = [
            stage.mask_ratio if isinstance(stage, ClozeStage) else 1 for stage in config.stages
        ]
        n_queries = int(positions * max(ratios, default=1)) + 1
        loss = min(LOGITS_BYTES, n_queries * n_items * FLOAT)
        gradients = n_workers * n_parameters * FLOAT
    else:  # the gradient is sparse: rows of the microbatch, the targets and the negatives
        n_negatives = config.loss.n_negatives if isinstance(config.loss, SampledSettings) else 1024
        n_scores = min(n_negatives * positions, AT_ONCE)
        loss = (3 * n_scores + 4 * positions * model.dim) * FLOAT
        n_whole = n_parameters // 10 if uses_sparse_gradient(n_items) else n_workers * n_parameters
        gradients = n_whole * FLOAT
    batch = n_workers * max(int(1.3 * kept) + loss, validation)
    optimizer = 2 * n_parameters * FLOAT + gradients
    return MemoryEstimate(2 * n_parameters * FLOAT, optimizer, batch, whole=whole)


def _class_of(config: RunConfig) -> type[SequenceModel]:
    model = MODELS[config.model.name]
    assert is_trained(model)
    return model


def _n_parameters(config: RunConfig, n_items: int, n_users: int) -> int:
    with torch.device("meta"):  # shapes only, no memory
        model = _class_of(config)(n_items, config.model, n_users)
    return sum(parameter.numel() for parameter in model.parameters())


def check_memory(
    config: RunConfig,
    n_items: int,
    longest: int,
    available: int | None,
    n_users: int = 0,
    n_processes: int = 1,
) -> MemoryEstimate:
    """The estimate; a ValueError that says which settings would fit when this one does not."""
    estimate = estimate_memory(config, n_items, longest, n_users, n_processes)
    if available is None or estimate.total <= available:
        return estimate
    raise ValueError(
        f"this run needs about {_size(estimate.total)} of memory and {_size(available)} are free. "
        f"{estimate}. {_advice(config, n_items, longest, available, n_users)}"
    )


def _advice(config: RunConfig, n_items: int, longest: int, available: int, n_users: int) -> str:
    def fits(change: str) -> bool:
        try:
            smaller = resolve(override_config(config, [change]), n_items)
        except ValueError:  # a width that the heads do not divide
            return False
        return estimate_memory(smaller, n_items, longest, n_users).total <= available

    assert isinstance(config.model, SequenceModelSettings)
    ideas = []
    for name, value, smallest in (
        ("training.workers", config.training.workers or default_workers(), 1),
        ("training.batch_size", config.training.batch_size, 1),
        ("model.max_len", config.model.max_len, 10),
        ("model.dim", config.model.dim, 8),
    ):
        value //= 2
        while value >= smallest and not fits(f"{name}={value}"):
            value //= 2
        if value >= smallest:
            ideas.append(f"--set {name}={value}")
    if getattr(config.model, "attention_dropout", 0) and fits("model.attention_dropout=0"):
        ideas.append("--set model.attention_dropout=0")
    if not ideas:
        return "No smaller setting alone fits: drop rare items (--set data.min_item_actions=5)."
    return "Each of these alone would fit: " + ", ".join(ideas) + "."


def available_memory() -> int | None:
    """Bytes that this process may still take: free memory, or a container's limit if lower."""
    limits = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    elif "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limits += _container_limit(Path("/sys/fs/cgroup"))
    return min(limits, default=None)


def _container_limit(folder: Path) -> list[int]:
    """What a container may still take; file pages that the kernel would give up count as free."""
    limit, used, facts = (folder / f"memory.{name}" for name in ("max", "current", "stat"))
    if not (limit.exists() and used.exists() and facts.exists()):
        return []
    if (text := limit.read_text().strip()) == "max":
        return []
    statistics = dict(line.split() for line in facts.read_text().splitlines())
    return [int(text) - int(used.read_text()) + int(statistics.get("inactive_file", 0))]


def _size(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.2f} GiB" if n_bytes >= GIB / 10 else f"{n_bytes / 2**20:.0f} MiB"
