"""Which users each process trains on, and how many of them a step takes.

The users are split into shards, ranges of the memory-mapped sequences, so that a process reads only
its own part of the files. Every step takes sequences from all shards, in proportion to their sizes.
Which sequences and masks a step has follows from the seed and the number of shards, and not from
the number of processes: a run of four shards can be resumed by fewer processes. Dropout and
negatives are drawn by each process for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bert4rec.data.splits import Spans


@dataclass(frozen=True)
class UserShards:
    """The shards of a run, and which of them this process trains on."""

    n: int = 1
    mine: tuple[int, ...] = (0,)

    def part(self, spans: Spans, shard: int) -> Spans:
        """The users of one shard; all of them where there is only one."""
        if self.n == 1:
            return spans
        first, last = (len(spans) * number // self.n for number in (shard, shard + 1))
        return spans.take(np.arange(first, last))


ALL_USERS = UserShards()


def shards_of(n_shards: int | None, n_processes: int, rank: int) -> UserShards:
    """The shards of one process; by default there is one per process."""
    n = n_processes if n_shards is None else n_shards
    return UserShards(n, tuple(range(rank, n, n_processes)))


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
            f"{name}, and only {n_users:,} users to train on: each shard needs one or more, so "
            f"use at most {n_users:,}"
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
    return -(-n_windows * batch_size // n_all)
