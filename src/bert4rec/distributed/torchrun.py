"""A training in several processes: started by torchrun here, or joined as one of them.

torchrun starts a failed training again, whatever the reason was. A mistake in the input stays one,
so the launch that met it writes it down, and does not try it again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import torch

from bert4rec.data.sequences import Sequences
from bert4rec.distributed.launch import is_restart, joined, launch_id
from bert4rec.durable import write_file
from bert4rec.interrupts import Interrupted
from bert4rec.training.process_group import ProcessGroup

STARTED_BY_US = "BERT4REC_STARTED_PROCESSES"  # in the environment: the coordinator speaks for them
FAILED = ".failed.json"
MOST_RESTARTS = 3


class ProcessFailed(Exception):
    """A process of the training failed, and has said why."""


def start_processes(words: list[str], n: int) -> None:
    """Run `bert4rec` with these words in `n` processes of this machine that share the cores.

    The same as `torchrun --standalone --nproc-per-node N -m bert4rec …`, without torchrun's reports
    of errors that the processes have already printed.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // n)))
    os.environ[STARTED_BY_US] = "1"
    # The processes themselves say who died and why, and that they resume.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    options = ["--standalone", "--nproc-per-node", str(n), "--max-restarts", str(MOST_RESTARTS)]
    arguments = get_args_parser().parse_args([*options, "-m", "bert4rec", *words])
    try:
        run(arguments)  # type: ignore[no-untyped-call]
    except ChildFailedError:
        raise ProcessFailed from None
    except (SignalException, KeyboardInterrupt):
        raise Interrupted from None
    finally:
        del os.environ[STARTED_BY_US]


def run_as_rank(out: Path, work: Callable[[ProcessGroup], object]) -> NoReturn:
    """Join the processes that torchrun started, do `work` with them, and end this process.

    `out` is the directory of the model. `ProcessFailed` is raised where another process, or this
    launch before, has already said what is wrong.
    """
    if is_restart() and failure_of(out, launch_id()) is not None:
        raise ProcessFailed
    if os.environ.get("RANK") == "0":
        forget_failure(out)
    with joined_for(out) as group:
        work(group)
    # All is saved. Threads of torch's connections that still run while Python ends can abort the
    # process, and torchrun would start a finished training again.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextlib.contextmanager
def joined_for(out: Path) -> Iterator[ProcessGroup]:
    """The processes of this launch, joined; a ValueError is remembered in the model's directory."""
    try:
        with joined() as group:
            yield group
            group.barrier()  # torchrun ends in minutes if all but the first are gone
    except ValueError as error:
        if failure_of(out, launch_id()) == str(error):
            raise ProcessFailed from None
        if out.is_dir():
            write_file(out / FAILED, json.dumps({"launch": launch_id(), "error": str(error)}))
        raise


def open_on_first(data: str, open_data: Callable[[], Sequences], group: ProcessGroup) -> Sequences:
    """The data, prepared by the first process; the others open it at the same place."""
    if group.is_first:
        sequences = open_data()
        group.from_first(str(sequences.directory))
        return sequences
    place = Path(group.from_first(None))
    if (Path(data) / "meta.json").is_file():  # perhaps a copy of its own: they are compared later
        return open_data()
    return load_shared(place)


def load_shared(place: Path) -> Sequences:
    """Data that another process prepared, perhaps on another machine."""
    if not (place / "meta.json").is_file():
        raise ValueError(
            f"the prepared data is not at {place} here: prepare it with `bert4rec data prepare --out` "
            "into a folder that all machines share"
        )
    return Sequences.load(place)


def failure_of(out: Path, launch: str | None) -> str | None:
    """Why this launch has failed before; None if it has not."""
    path = out / FAILED
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    return str(content["error"]) if content["launch"] == launch else None


def forget_failure(out: Path) -> None:
    (out / FAILED).unlink(missing_ok=True)


def speaks_for_all() -> bool:
    """Whether this process prints for all: the first one, unless `start_processes` started it."""
    return os.environ.get("RANK", "0") == "0" and STARTED_BY_US not in os.environ
