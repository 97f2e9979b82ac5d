"""A training on a Ray cluster, by Ray Train: the same code as under torchrun.

Ray places the workers, joins them by `torch.distributed` and starts them again when one dies; they
go on from the last checkpoint in the model's directory, which must lie on storage that all machines
of the cluster share, as must the prepared data.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bert4rec.cluster import connect
from bert4rec.config import Config, parse_config

MOST_RESTARTS = 3
SAID = "said.txt"  # what the first worker says, for whoever waits


def train_on_ray(
    data: Path,
    config: Config,
    out: Path,
    *,
    n_processes: int,
    address: str | None,
    resume: bool,
    overwrite: bool,
    baselines: bool,
    say: Callable[[str], None],
) -> None:
    """Train on the prepared data, evaluate, and save to `out`, with one worker a process."""
    with connect(address, n_workers=n_processes):
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        out = out.resolve()
        out.mkdir(parents=True, exist_ok=True)
        (out / SAID).write_text("", encoding="utf-8")
        given = {
            "data": str(data.resolve()),
            "config": config.model_dump(mode="json"),
            "out": str(out),
            "resume": resume,
            "overwrite": overwrite,
            "baselines": baselines,
            "launch": uuid.uuid4().hex,
        }
        uses_gpu = config.training.device == "cuda"
        trainer = TorchTrainer(
            _worker,
            train_loop_config=given,
            torch_config=TorchConfig(backend="nccl" if uses_gpu else "gloo"),
            scaling_config=ScalingConfig(num_workers=n_processes, use_gpu=uses_gpu),
            run_config=RunConfig(
                name="ray",
                storage_path=str(out),
                failure_config=FailureConfig(max_failures=MOST_RESTARTS),
            ),
        )
        try:
            with _following(out / SAID, say):
                trainer.fit()
        except Exception as error:
            raise _plain(error) from None
        finally:
            shutil.rmtree(out / "ray", ignore_errors=True)
            (out / SAID).unlink(missing_ok=True)


def _worker(given: dict[str, Any]) -> None:
    """What each of Ray's workers does."""
    import torch
    from rich.console import Console

    from bert4rec.data.sequences import Sequences
    from bert4rec.pipeline import train_beside, train_recommender
    from bert4rec.training.distributed import joined

    os.environ["BERT4REC_LAUNCH"] = given["launch"]
    config, out = parse_config(given["config"], "the driver's settings"), Path(given["out"])
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    if not (Path(given["data"]) / "meta.json").is_file():
        raise ValueError(
            f"{given['data']} cannot be seen from a worker: prepare the data with `bert4rec data "
            "prepare --out` into a folder that all machines share"
        )
    sequences = Sequences.load(given["data"])
    with joined() as ranks:
        if not ranks.is_first:
            train_beside(sequences, config, out, ranks)
            return
        with (out / SAID).open("a", encoding="utf-8", buffering=1) as file:
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


@contextlib.contextmanager
def _following(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Lines that another process adds to a file, said as they come."""
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


def _plain(error: BaseException) -> Exception:
    """The error of a worker without Ray's pages around it."""
    cause: BaseException | None = error
    while cause is not None:
        failures = getattr(cause, "worker_failures", None) or {}
        inner = next(iter(failures.values()), None) or getattr(cause, "cause", None)
        if isinstance(cause, ValueError):
            return ValueError(str(cause).strip().splitlines()[-1].removeprefix("ValueError: "))
        cause = inner if isinstance(inner, BaseException) else cause.__cause__
    return RuntimeError(f"the training on Ray failed: {error}")
