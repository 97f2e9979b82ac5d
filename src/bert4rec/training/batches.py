"""Batches of training sequences, cut into microbatches of similar length.

Which sequences, masks and queries a step has follows from (seed, stage, epoch) and (seed, stage,
step) alone, so that a resumed run is bit-identical.

The users are split into shards, ranges of the memory-mapped sequences, so that a process reads its
own part of the files only. Every step takes from all shards, in proportion to their sizes. Batches
and masks depend on the number of shards and not on that of processes: a run of four shards can be
resumed with fewer processes. Dropout and negatives are drawn by each process for itself.

Shapes: B batch, L length, M queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bert4rec.data.splits import FOR_TRAINING, MicrobatchSize, Spans, group_by_length
from bert4rec.objectives import Objective
from bert4rec.threads import WorkerThreads
from bert4rec.training.process_group import ProcessGroup


def users_of_shard(spans: Spans, shard: int, n_shards: int) -> Spans:
    if n_shards == 1:
        return spans
    first, last = (len(spans) * number // n_shards for number in (shard, shard + 1))
    return spans.take(np.arange(first, last))


def check_shards(n_shards: int | None, n_processes: int, n_users: int, batch_size: int) -> None:
    """A ValueError when a process or a shard would have nothing to train on."""
    n = n_processes if n_shards is None else n_shards
    name = f"{n} processes" if n_shards is None else f"training.shards = {n}"
    if n < n_processes:
        raise ValueError(
            f"{name} and {n_processes} processes: a process would have nothing to train on; start "
            f"at most {n} processes, or begin anew with --set training.shards={n_processes}"
        )
    if n > n_users:
        raise ValueError(
            f"{name}, and only {n_users:,} users to train on: each shard needs one or more, so use at most {n_users:,}"
        )
    if n > batch_size:
        raise ValueError(
            f"{name} and training.batch_size = {batch_size}: a step takes its sequences from every "
            f"shard, so use at most {batch_size} shards or a larger batch"
        )


def share_of_batch(n_windows: int, n_all: int, batch_size: int) -> int:
    """How many of its windows a shard gives to each step, so that all shards end together.

    Rounded up: a step of n shards may have up to n - 1 sequences more than `batch_size`.
    """
    return max(1, -(-n_windows * batch_size // max(1, n_all)))


class Microbatch(NamedTuple):
    tokens: Tensor  # (B, L) what the model sees, padded at the end
    positions: Tensor  # (M,) flat query positions of `tokens`, in order
    users: Tensor  # (B,) rows
    targets: Tensor  # (M,) the items that are to be predicted
    inserts_masks: bool = False  # whether the model puts a [MASK] after each position


@dataclass(frozen=True)
class Batch:
    microbatches: list[Microbatch]

    @property
    def n_sequences(self) -> int:
        return sum(len(each.users) for each in self.microbatches)

    @property
    def n_queries(self) -> int:
        return sum(len(each.targets) for each in self.microbatches)


class Sizes(NamedTuple):
    """How a batch is cut, so that no worker idles."""

    microbatch: MicrobatchSize = FOR_TRAINING
    n_workers: int = 1


class StageBatches:
    """The batches of one stage, in this process; `objectives` has one for each of its shards."""

    def __init__(
        self,
        objectives: Mapping[int, Objective],
        seed: tuple[int, int],  # of the run, and the number of the stage
        pad: int,
        batch_size: int,
        sizes: Sizes,
        group: ProcessGroup,
    ) -> None:
        self.objectives, self.seed, self.pad, self.sizes = objectives, seed, pad, sizes
        counts = {
            shard: len(objective.draw_sequences(np.random.default_rng(0))) for shard, objective in objectives.items()
        }
        n_all = int(group.sum(sum(counts.values()))[0])
        self.n_per_step = {shard: share_of_batch(n, n_all, batch_size) for shard, n in counts.items()}
        longest = max(-(-n // self.n_per_step[shard]) for shard, n in counts.items())
        self.steps_per_epoch: int = max(group.all_gather(longest))

    def epoch(self, epoch: int, first: int, batch_thread: WorkerThreads) -> Iterator[Batch]:
        """The batches of an epoch from number `first` on, made ahead on `batch_thread`."""
        shards = []
        for shard, objective in self.objectives.items():
            generator = np.random.default_rng([*self.seed, epoch, shard])
            sequences = objective.draw_sequences(generator)
            order = shuffled_batches(len(sequences), self.n_per_step[shard], generator)
            shards.append((shard, objective, sequences, order))

        def make(number: int) -> Batch:
            step, microbatches = epoch * self.steps_per_epoch + number, []
            for shard, objective, sequences, order in shards:
                if number < len(order):
                    masks = torch.Generator().manual_seed(self.seed_of(step, shard))
                    rows = sequences.take(order[number])
                    microbatches += make_batch(objective, rows, self.pad, masks, self.sizes).microbatches
            return Batch(microbatches)

        return batch_thread.stream(make, range(first, self.steps_per_epoch), ahead=2)

    def seed_of(self, step: int, shard: int = 0) -> int:
        """What is random in a step follows from the run's seed and the step's place alone."""
        place = [*self.seed, step, shard]
        return int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> 1)


def shuffled_batches(n_sequences: int, batch_size: int, generator: np.random.Generator) -> list[NDArray[np.int64]]:
    """An epoch's batches as sequence numbers: each exactly once, in random order.

    Lengths play no part in it. They are sorted within a batch only, where the order of a sum does
    not matter, so the gradient is that of plain random batches.
    """
    order = generator.permutation(n_sequences)
    return [order[i : i + batch_size] for i in range(0, n_sequences, batch_size)]


def make_batch(
    objective: Objective,
    sequences: Spans,
    pad: int,
    generator: torch.Generator,
    sizes: Sizes = Sizes(),  # noqa: B008
) -> Batch:
    """The queries of these sequences, in microbatches."""
    fair_share = -(-int(sequences.lengths.sum()) // sizes.n_workers)
    most = min(sizes.microbatch.positions, max(FOR_TRAINING.positions, fair_share))
    size = MicrobatchSize(most, sizes.microbatch.padding)
    sequences = sequences.take(np.argsort(-sequences.lengths, kind="stable"))
    padded = torch.from_numpy(sequences.padded(np.arange(len(sequences)), pad))
    inputs, targets, is_target = objective.make_examples(padded, generator)
    lengths = sequences.lengths - (padded.shape[1] - inputs.shape[1])
    users = torch.from_numpy(sequences.users)
    microbatches = []
    for rows in group_by_length(lengths, size):
        part = (rows, slice(0, int(lengths[rows.start])))
        places = is_target[part].flatten().nonzero()[:, 0]
        microbatches.append(
            Microbatch(
                inputs[part].contiguous(),
                places // targets.shape[2],
                users[rows],
                targets[part].flatten()[places],
                objective.inserts_masks,
            )
        )
    return Batch(microbatches)
