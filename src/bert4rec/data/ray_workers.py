"""Workers of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import duckdb


class RayWorkers:
    """Tasks on the cluster that this process is connected to, at most `n_workers` at a time."""

    def __init__(self, n_workers: int) -> None:
        self.n_workers = n_workers

    def map(self, task: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        import ray
        from ray.exceptions import RayTaskError

        # Ray tries a task again whose machine dies; what a task itself refuses stays refused.
        remote = ray.remote(num_cpus=1, max_retries=3)(task)
        results: dict[Any, Any] = {}
        order: list[Any] = []
        waiting: list[Any] = []
        try:
            for each in arguments:
                if len(waiting) == self.n_workers:
                    done, waiting = ray.wait(waiting)
                    results |= {reference: ray.get(reference) for reference in done}
                order.append(remote.remote(*each))
                waiting.append(order[-1])
            for reference in order:
                results[reference] = ray.get(reference)
        except RayTaskError as error:
            for reference in waiting:
                ray.cancel(reference)
            # In our own words, or as `prepare` expects it; not with the worker's traceback.
            if isinstance(error.cause, ValueError | duckdb.OutOfMemoryException):
                raise error.cause from None
            raise
        return [results[reference] for reference in order]
