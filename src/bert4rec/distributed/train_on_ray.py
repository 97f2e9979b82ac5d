"""A training on a Ray cluster, by Ray Train: the same code as under torchrun.

Ray places the workers, joins them by `torch.distributed` and starts them again when one dies. They
resume from the last checkpoint in the model's directory. The directory and the prepared data must
be on storage that all machines of the cluster share.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bert4rec.data.sequences import Sequences
from bert4rec.distributed.cluster import connect
from bert4rec.distributed.launch import LONGEST_WAIT
from bert4rec.distributed.torchrun import MOST_RESTARTS, failure_of, forget_failure, joined_for, load_shared
from bert4rec.interrupts import Interrupted
from bert4rec.training.process_group import ProcessGroup

OUTPUT = "said.txt"  # what the first worker prints, for the command that waits
RankWork = Callable[[Sequences, ProcessGroup, Console], object]  # what each process does


@dataclass(frozen=True)
class RayProcesses:
    n: int
    n_threads: int = 1  # CPU threads, and CPUs, per process
    with_gpu: bool = False  # one GPU per process
    address: str | None = None  # see `cluster.connect`


def run_on_ray(data: Path, out: Path, work: RankWork, processes: RayProcesses, say: Callable[[str], None]) -> None:
    """Do `work` in each of several Ray workers, joined as the ranks of one training.

    `work` must be known by name on all machines, or be a closure of such functions. What the first
    rank prints to its console is passed to `say` line by line.
    """
    with connect(processes.address, n_workers=processes.n * processes.n_threads):
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        data, out = data.resolve(), out.resolve()
        out.mkdir(parents=True, exist_ok=True)
        (out / OUTPUT).write_text("", encoding="utf-8")
        launch = uuid.uuid4().hex

        def run_worker() -> None:
            _run_worker(data, out, work, launch, processes.n_threads)

        trainer = TorchTrainer(
            run_worker,
            torch_config=TorchConfig(
                backend="cpu:gloo,cuda:nccl" if processes.with_gpu else "gloo",
                timeout_s=int(LONGEST_WAIT.total_seconds()),
            ),
            scaling_config=ScalingConfig(
                num_workers=processes.n,
                use_gpu=processes.with_gpu,
                resources_per_worker={"CPU": processes.n_threads} | ({"GPU": 1} if processes.with_gpu else {}),
            ),
            run_config=RunConfig(
                name="ray", storage_path=str(out), failure_config=FailureConfig(max_failures=MOST_RESTARTS)
            ),
        )
        try:
            with _following(out / OUTPUT, say):
                trainer.fit()
        except KeyboardInterrupt:
            raise Interrupted from None
        except Exception as error:
            if (reason := failure_of(out, launch)) is not None:
                raise ValueError(reason) from None
            raise RuntimeError(f"the training on Ray failed: {error}") from None
        finally:
            forget_failure(out)
            shutil.rmtree(out / "ray", ignore_errors=True)
            (out / OUTPUT).unlink(missing_ok=True)


def _run_worker(data: Path, out: Path, work: RankWork, launch: str, n_threads: int) -> None:
    import torch

    os.environ["BERT4REC_LAUNCH"] = launch
    torch.set_num_threads(n_threads)
    if (reason := failure_of(out, launch)) is not None:
        raise ValueError(reason)  # Ray starts us again, whatever the reason was
    with joined_for(out) as group, (out / OUTPUT).open("a", encoding="utf-8", buffering=1) as file:
        work(load_shared(data), group, Console(file=file, force_terminal=False, width=200))


@contextlib.contextmanager
def _following(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Say the lines that another process appends to a file, as they come."""
    is_over = threading.Event()

    def follow() -> None:
        with path.open(encoding="utf-8") as file:
            while True:
                was_over = is_over.wait(0.5)
                for line in file:
                    say(line.rstrip("\n"))
                if was_over:
                    return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
