"""A training in several processes of this machine, started and watched over by torchrun.

The same as `torchrun --standalone --nproc-per-node N -m bert4rec train …`, without its reports of
errors that the processes have already told.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from bert4rec.durable import write_file
from bert4rec.training.distributed import is_restart, launch_id

FAILED = ".failed.json"
MOST_RESTARTS = 3


class Stopped(Exception):
    """The processes were asked to stop; they have saved what they had."""


class Failed(Exception):
    """A process failed, and has said why."""


def start_processes(words: list[str], n: int) -> None:
    """`bert4rec` with these words, in `n` processes at once that share the cores."""
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // n)))
    options = ["--standalone", "--nproc-per-node", str(n), "--max-restarts", str(MOST_RESTARTS)]
    arguments = get_args_parser().parse_args([*options, "-m", "bert4rec", *words])
    try:
        run(arguments)  # type: ignore[no-untyped-call]
    except ChildFailedError:
        raise Failed from None
    except (SignalException, KeyboardInterrupt):
        raise Stopped from None


def remember_failure(out: Path, error: Exception) -> None:
    """A mistake in the input stays one: torchrun need not hear of it once for every restart."""
    if out.is_dir():
        write_file(out / FAILED, json.dumps({"launch": launch_id(), "error": str(error)}))


def has_failed_before(out: Path) -> bool:
    """Whether this launch has already ended by a mistake in the input, and said so."""
    path = out / FAILED
    if not path.is_file():
        return False
    is_same = is_restart() and json.loads(path.read_text())["launch"] == launch_id()
    if not is_same:
        path.unlink(missing_ok=True)
    return is_same
