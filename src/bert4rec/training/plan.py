"""How much memory a training run will need, before it starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from bert4rec.config import Config
from bert4rec.models import LEARNED
from bert4rec.parallel import default_workers
from bert4rec.ranking import SCORES_BYTES
from bert4rec.training.losses import AT_ONCE, leaves_most_alone
from bert4rec.training.settled import settled

FLOAT = 4
GIB = 2**30
VALIDATION_ROWS = 256


@dataclass(frozen=True)
class MemoryPlan:
    parameters: int  # bytes, as all of these; twice, as the best ones are kept aside
    optimizer: int  # a gradient for each worker, and AdamW's two moments
    batch: int  # what the workers hold for the pieces they compute, or a validation
    process: int = 400 * 2**20  # Python, torch and the data that is mapped
    whole: int = 0  # at the end of a training with dealt-out items, for the first process

    @property
    def total(self) -> int:
        training = self.parameters + self.optimizer + self.batch
        return max(training, self.whole) + self.process

    def __str__(self) -> str:
        return (
            f"memory plan: {_size(self.total)} = parameters {_size(self.parameters)} + optimiser "
            f"{_size(self.optimizer)} + largest batch {_size(self.batch)} + process "
            f"{_size(self.process)}"
        )


def plan_memory(
    config: Config, n_items: int, longest: int, n_users: int = 0, n_processes: int = 1
) -> MemoryPlan:
    """An estimate for one process from the shapes; `longest` is the longest training history.

    What is kept between the passes is that of the Transformer; other models keep less.
    """
    config = settled(config, n_items)
    model, training = config.model, config.training
    length = min(model.max_len, longest)
    n_workers = training.workers or default_workers()
    n_parameters = _n_parameters(config, n_items, n_users)
    whole = 0
    if training.shard_items:
        n_rows = n_items * (model.dim + 1)
        n_parameters += n_rows // n_processes - n_rows
        whole = (n_rows + n_rows // n_processes) * FLOAT
    # A worker holds one piece of the batch at a time.
    at_once = LEARNED[model.name].piece.positions
    positions = min(training.batch_size * length, max(at_once, length))
    # What autograd keeps a position and block, in widths of dim: the input, q, k, v, the mixture,
    # the projections, sums, norms and dropout, and three arrays of the fourfold inner layer.
    kept = positions * model.dim * (4 + model.layers * 26) * FLOAT
    asks_every_item = _asks_every_item(config)
    if asks_every_item:  # as many [MASK]s as items
        kept *= 2
    if model.attention_dropout:  # no fused kernel: scores, probabilities, mask and product are kept
        kept += model.layers * 4 * positions * length * model.heads * FLOAT
    scores = min(max(SCORES_BYTES, n_items * FLOAT), VALIDATION_ROWS * n_items * FLOAT)
    validation = 2 * scores  # and comparisons with them
    if training.loss == "cross-entropy":
        is_cloze = LEARNED[model.name].task == "cloze" and not asks_every_item
        asked = int(positions * training.mask_ratio) + 1 if is_cloze else positions
        loss = min(training.loss_memory_mb * 2**20, asked * n_items * FLOAT)
        gradients = n_workers * n_parameters * FLOAT
    else:  # the gradient is sparse: rows of the piece, the targets and the negatives
        n_scores = min(training.n_negatives * positions, AT_ONCE)
        loss = (3 * n_scores + 4 * positions * model.dim) * FLOAT
        n_whole = n_parameters // 10 if leaves_most_alone(n_items) else n_workers * n_parameters
        gradients = n_whole * FLOAT
    batch = n_workers * max(int(1.3 * kept) + loss, validation)
    optimizer = 2 * n_parameters * FLOAT + gradients
    return MemoryPlan(2 * n_parameters * FLOAT, optimizer, batch, whole=whole)


def _asks_every_item(config: Config) -> bool:
    """In one of the stages."""
    if LEARNED[config.model.name].task != "cloze":
        return False
    second = config.second_stage
    is_in_second = second.epochs > 0 and second.asks == "every-item"
    return config.training.next_item_share > 0 or is_in_second


def _n_parameters(config: Config, n_items: int, n_users: int) -> int:
    with torch.device("meta"):  # shapes only, no memory
        model = LEARNED[config.model.name](n_items, config.model, n_users)
    return sum(parameter.numel() for parameter in model.parameters())


def check_memory(
    config: Config,
    n_items: int,
    longest: int,
    available: int | None,
    n_users: int = 0,
    n_processes: int = 1,
) -> MemoryPlan:
    """The plan; a ValueError that says which settings would fit when this one does not."""
    plan = plan_memory(config, n_items, longest, n_users, n_processes)
    if available is None or plan.total <= available:
        return plan
    raise ValueError(
        f"this run needs about {_size(plan.total)} of memory and {_size(available)} are free. "
        f"{plan}. {_advice(config, n_items, longest, available, n_users)}"
    )


def _advice(config: Config, n_items: int, longest: int, available: int, n_users: int) -> str:
    def fits(section: str, **changes: float) -> bool:
        settings = getattr(config, section).model_copy(update=changes)
        smaller = config.model_copy(update={section: settings})
        return plan_memory(smaller, n_items, longest, n_users).total <= available

    ideas = []
    for key, section, smallest in (
        ("workers", "training", 1),
        ("batch_size", "training", 1),
        ("max_len", "model", 10),
        ("dim", "model", 4 * config.model.heads),
    ):
        value = (getattr(getattr(config, section), key) or default_workers()) // 2
        while value >= smallest and not fits(section, **{key: value}):
            value //= 2
        if value >= smallest and (key != "dim" or value % config.model.heads == 0):
            ideas.append(f"--set {section}.{key}={value}")
    if config.model.attention_dropout and fits("model", attention_dropout=0.0):
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
