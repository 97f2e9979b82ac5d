"""A training in several processes of this machine, started and watched over by torchrun.

The same as `torchrun --standalone --nproc-per-node N -m bert4rec train …`, without its reports of
errors that the processes have already told.
"""

from __future__ import annotations

import logging
import os

STARTED_BY_US = "BERT4REC_STARTED_PROCESSES"  # in their environment: who started them speaks
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
    os.environ[STARTED_BY_US] = "1"
    # Who died and why, and that all go on, is said by the processes themselves.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    options = ["--standalone", "--nproc-per-node", str(n), "--max-restarts", str(MOST_RESTARTS)]
    arguments = get_args_parser().parse_args([*options, "-m", "bert4rec", *words])
    try:
        run(arguments)  # type: ignore[no-untyped-call]
    except ChildFailedError:
        raise Failed from None
    except (SignalException, KeyboardInterrupt):
        raise Stopped from None
