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
from typing import TYPE_CHECKING, Any

from bert4rec.config import Config, parse_config
from bert4rec.distributed.cluster import connect
from bert4rec.distributed.torchrun import failure_of, forget_failure, remember_failure
from bert4rec.interrupts import Interrupted

if TYPE_CHECKING:
    from bert4rec.data.sequences import Sequences

MOST_RESTARTS = 3
OUTPUT = "said.txt"  # what the first worker prints, for the command that waits


@dataclass(frozen=True)
class RayProcesses:
    n: int
    n_threads: int = 1  # CPU threads, and CPUs, per process
    address: str | None = None  # see `cluster.connect`


def train_on_ray(
    data: Path,
    config: Config,
    out: Path,
    processes: RayProcesses,
    *,
    resume: bool = False,
    overwrite: bool = False,
    baselines: bool = True,
    say: Callable[[str], None],
) -> None:
    """Train on the prepared data, evaluate and save to `out`, with one Ray worker per process."""
    with connect(processes.address, n_workers=processes.n * processes.n_threads):
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        from bert4rec.training.distributed import LONGEST_WAIT

        out = out.resolve()
        out.mkdir(parents=True, exist_ok=True)
        (out / OUTPUT).write_text("", encoding="utf-8")
        launch = uuid.uuid4().hex
        given = {
            "data": str(data.resolve()),
            "config": config.model_dump(mode="json"),
            "out": str(out),
            "resume": resume,
            "overwrite": overwrite,
            "baselines": baselines,
            "launch": launch,
            "threads": processes.n_threads,
        }
        uses_gpu = config.training.device == "cuda"
        trainer = TorchTrainer(
            _worker,
            train_loop_config=given,
            torch_config=TorchConfig(
                backend="cpu:gloo,cuda:nccl" if uses_gpu else "gloo",
                timeout_s=int(LONGEST_WAIT.total_seconds()),
            ),
            scaling_config=ScalingConfig(
                num_workers=processes.n,
                use_gpu=uses_gpu,
                resources_per_worker={"CPU": processes.n_threads}
                | ({"GPU": 1} if uses_gpu else {}),
            ),
            run_config=RunConfig(
                name="ray",
                storage_path=str(out),
                failure_config=FailureConfig(max_failures=MOST_RESTARTS),
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


def _worker(given: dict[str, Any]) -> None:
    """What each of Ray's workers runs."""
    import torch

    from bert4rec.data.sequences import Sequences

    os.environ["BERT4REC_LAUNCH"] = given["launch"]
    config, out = parse_config(given["config"], "the driver's settings"), Path(given["out"])
    torch.set_num_threads(given["threads"])
    if (reason := failure_of(out, given["launch"])) is not None:
        raise ValueError(reason)  # Ray starts us again, whatever the reason was
    if not (Path(given["data"]) / "meta.json").is_file():
        raise ValueError(
            f"{given['data']} cannot be seen from a worker: prepare the data with `bert4rec data "
            "prepare --out` into a folder that all machines share"
        )
    try:
        _train(Sequences.load(given["data"]), config, out, given)
    except ValueError as error:
        remember_failure(out, error)
        raise


def _train(sequences: Sequences, config: Config, out: Path, given: dict[str, Any]) -> None:
    from rich.console import Console

    from bert4rec.pipeline import train_beside, train_recommender
    from bert4rec.training.distributed import joined

    with joined() as ranks, (out / OUTPUT).open("a", encoding="utf-8", buffering=1) as file:
        if ranks.is_first:
            train_recommender(
                sequences,
                config,
                out,
                resume=given["resume"],
                overwrite=given["overwrite"],
                baselines=given["baselines"],
                console=Console(file=file, force_terminal=False, width=200),
                ranks=ranks,
            )
        else:
            train_beside(sequences, config, out, ranks)
        ranks.wait_for_first()


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
