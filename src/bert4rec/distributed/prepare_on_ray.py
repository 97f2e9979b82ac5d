"""Prepare data on a Ray cluster whose machines share a storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import duckdb


class RayWorkers:
    """Tasks on the connected Ray cluster, at most `n_workers` at a time."""

    def __init__(self, n_workers: int) -> None:
        self.n_workers = n_workers

    def map(self, task: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        import ray
        from ray.exceptions import RayTaskError

        # Ray repeats a task whose machine died, but not one that raised an error.
        remote = ray.remote(num_cpus=1, max_retries=3)(task)
        order: list[Any] = []
        running: list[Any] = []
        try:
            for each in arguments:
                if len(running) == self.n_workers:
                    done, running = ray.wait(running)
                    ray.get(done)  # raises the error of a failed task now
                order.append(remote.remote(*each))
                running.append(order[-1])
            return list(ray.get(order))
        except RayTaskError as error:
            # Not ray.cancel: on a task that ends just then it has aborted the whole driver.
            ray.wait(running, num_returns=len(running))
            # Our own errors, and the one that `prepare` expects, without the worker's traceback.
            if isinstance(error.cause, ValueError | duckdb.OutOfMemoryException):
                raise error.cause from None
            raise
