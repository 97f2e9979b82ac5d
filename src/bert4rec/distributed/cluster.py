"""A Ray cluster to work on: one that is running, or one on this machine while we need it.

Ray waits minutes for a cluster that is not there, so we look first whether one answers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

ADDRESS_VARIABLE = "RAY_ADDRESS"
SECONDS_TO_ANSWER = 10.0

# HTTP/2, which Ray's head speaks: what a client sends first, and the type of the first answer.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">IBI", 0, 4, 0)
_FRAME_HEADER_BYTES, _SETTINGS = 9, 4

# What a worker prints stays in Ray's logs; what goes wrong comes back as an exception.
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "configure_logging": True}


@dataclass(frozen=True)
class Cluster:
    address: str  # HOST:PORT of its head
    n_cpus: int


def check_has_ray() -> None:
    """A ValueError that says what to install."""
    if importlib.util.find_spec("ray") is None:
        raise ValueError("Ray is not installed: pip install 'bert4rec[scale]'")


@contextlib.contextmanager
def connect(address: str | None, *, n_workers: int | None) -> Iterator[Cluster]:
    """Ray, ready for `n_workers` workers; at the end only what was started here is ended.

    `address` is HOST:PORT of a cluster's head, or `auto` for the cluster that this machine belongs
    to. It defaults to the variable RAY_ADDRESS. Without both, or with `local`, Ray is started on
    this machine with `n_workers` CPUs. `n_workers` defaults to all CPUs. A process that is
    connected already stays connected.
    """
    if n_workers is not None and n_workers < 1:
        raise ValueError(f"n_workers is {n_workers}: use one or more")
    check_has_ray()
    keep_ray_quiet()
    ray = _untyped_ray()
    if ray.is_initialized():
        connected = _connected()
        if address not in (None, "auto", "local") and _reachable(address) != connected.address:
            raise ValueError(
                f"this process is connected to the Ray cluster at {connected.address}, and "
                f"{address} is another: use one of them"
            )
        yield _enough(connected, n_workers)
        return
    address = address or os.environ.get(ADDRESS_VARIABLE) or "local"
    if address == "local":
        ray.init("local", num_cpus=n_workers, include_dashboard=False, **_QUIET)
    else:
        ray.init(_reachable(address), **_QUIET)
    try:
        yield _enough(_connected(), n_workers)
    finally:
        ray.shutdown()


class RayWorkers:
    """Tasks on the connected Ray cluster, at most `n_workers` at a time."""

    def __init__(self, n_workers: int) -> None:
        self.n_workers = n_workers

    def map(self, task: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        import duckdb
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


def _untyped_ray() -> Any:
    import ray

    return ray


def keep_ray_quiet() -> None:
    """Before Ray starts: no usage reports, no warnings on every start, normal priority."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Its workers would run with nice 15: on a busy machine they would never start.
    os.environ.setdefault("RAY_worker_niceness", "0")


def _connected() -> Cluster:
    ray = _untyped_ray()
    n_cpus = int(ray.cluster_resources().get("CPU", 0))
    return Cluster(ray.get_runtime_context().gcs_address, n_cpus)


def _enough(cluster: Cluster, n_workers: int | None) -> Cluster:
    """The cluster, if it has enough CPUs: Ray would wait for more machines without end."""
    if cluster.n_cpus < (n_workers or 1):
        raise ValueError(
            f"the Ray cluster at {cluster.address} has {cluster.n_cpus} CPUs, and "
            f"{n_workers or 1} workers were requested: use fewer, or add machines to it first"
        )
    return cluster


def _reachable(address: str) -> str:
    """The address as HOST:PORT, or a ValueError if no cluster answers there."""
    if address.startswith("ray://"):
        raise ValueError(
            f"{address} is for Ray's client, which cannot do this: run this command on a "
            "machine of the cluster, and give HOST:PORT of its head, or auto"
        )
    found = _of_this_machine() if address == "auto" else address
    host, colon, port = found.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{found!r} is not the address of a Ray cluster: give HOST:PORT, as in head:6379")
    try:
        _greet(host.strip("[]"), int(port))
    except OSError as error:
        raise _no_cluster(found, str(error)) from None
    return found


def _of_this_machine() -> str:
    from ray._private.services import get_ray_address_from_environment

    try:
        found: str = get_ray_address_from_environment("auto", None)
    except ConnectionError:
        raise _no_cluster("auto", "no Ray runs on this machine") from None
    return found


def _greet(host: str, port: int) -> None:
    """An OSError unless something answers that speaks Ray's protocol."""
    with socket.create_connection((host, port), SECONDS_TO_ANSWER) as connection:
        if os.environ.get("RAY_USE_TLS", "0") == "1":
            return  # it is there, and would answer only Ray
        connection.sendall(_GREETING)
        answer = connection.makefile("rb").read(_FRAME_HEADER_BYTES)
    if len(answer) < _FRAME_HEADER_BYTES or answer[3] != _SETTINGS:
        raise OSError("something else than Ray is there")


def _no_cluster(address: str, why: str) -> ValueError:
    return ValueError(
        f"no Ray cluster answers at {address} ({why}): start one with `ray start --head`, or "
        "leave out --ray-address to start one on this machine"
    )
