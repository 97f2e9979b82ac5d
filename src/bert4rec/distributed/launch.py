"""How this process was started: alone, or by torchrun or Ray as one of several that train together.

Whoever starts several says so in the environment; here they are joined by `torch.distributed`, gloo
for CPUs and NCCL for GPUs.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from bert4rec.training.process_group import SINGLE_PROCESS, ProcessGroup

# One process may prepare data or evaluate for a long time while the others wait for it. One that
# dies is noticed at once by its closed connection, and need not wait for this.
LONGEST_WAIT = timedelta(hours=24)
NO_ID = ("", "none")  # what torchrun says without --rdzv-id


def was_launched() -> bool:
    """Whether torchrun, or Ray, started this process as one of several."""
    is_one_of_several = "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    return is_one_of_several or dist.is_initialized()


@contextlib.contextmanager
def joined() -> Iterator[ProcessGroup]:
    """The processes of this run; a single one where nobody launched several."""
    if not was_launched():
        yield SINGLE_PROCESS
        return
    is_ours = not dist.is_initialized()  # Ray has joined its workers already
    try:
        if is_ours:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store = _meeting_place(rank, n)
            dist.init_process_group(backend, store=store, rank=rank, world_size=n, timeout=LONGEST_WAIT)
        yield ProcessGroup(dist.get_world_size(), dist.get_rank())
    except RuntimeError as error:
        is_about_others = any(word in str(error) for word in ("gloo", "NCCL"))
        if not is_about_others and not isinstance(error, dist.DistError):
            raise
        reason = str(error).splitlines()[0][:200]
        raise ConnectionError(f"another process of this training is gone ({reason})") from None
    finally:
        if is_ours and dist.is_initialized():
            dist.destroy_process_group()


def _meeting_place(rank: int, n: int) -> Any:
    """A store that only the processes of this very start write to.

    torchrun keeps one store over restarts, and so the addresses of processes that are dead. The
    first process draws a name that nobody used before, and answers it to whoever asks, until
    all that are alive have it.
    """
    store, _, _ = next(iter(rendezvous("env://", rank, n)))
    if rank > 0:
        me = uuid.uuid4().hex
        store.set(f"bert4rec/asks/{rank}", me)
        name = store.get(f"bert4rec/answer/{me}").decode()
        store.set(f"bert4rec/has/{name}/{rank}", "yes")
        return PrefixStore(name, store)
    name = uuid.uuid4().hex
    waiting = set(range(1, n))
    while waiting:
        for other in sorted(waiting):
            asking = store.get(f"bert4rec/asks/{other}").decode()
            store.set(f"bert4rec/answer/{asking}", name)
            if store.check([f"bert4rec/has/{name}/{other}"]):
                waiting.remove(other)
        time.sleep(0.02)
    return PrefixStore(name, store)


def processes_here() -> int:
    """Processes of the run on this machine, which share its memory and cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def launch_id() -> str | None:
    """A name of this launch, the same after it restarted its processes; None if it has none."""
    name = os.environ.get("BERT4REC_LAUNCH", os.environ.get("TORCHELASTIC_RUN_ID", ""))
    return None if name in NO_ID else name


def is_restart() -> bool:
    """Whether torchrun has started its processes again after one of them died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
