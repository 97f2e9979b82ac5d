"""Where and in which precision a model is trained.

bf16 on a CPU is tried in a child process first: some processors advertise instructions for it and
crash on them, and on many it is slower than float32.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from bert4rec.config import TrainingSettings
from bert4rec.cpu_tuning import without_onednn
from bert4rec.threads import WorkerThreads

# AMX is advertised by virtual machines that cannot run it; oneDNN reads this when torch is loaded.
SAFE_ISA = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
PROBE = """
import time, torch
torch.set_num_threads(1)
def seconds(dtype):
    a, b = (torch.randn(shape).to(dtype) for shape in ((2048, 64), (64, 256)))
    def once():
        start = time.perf_counter()
        for _ in range(20):
            a @ b
        return time.perf_counter() - start
    return min(once() for _ in range(5))
print(seconds(torch.float32) / seconds(torch.bfloat16))
"""


@dataclass(frozen=True)
class Hardware:
    """A device and a precision."""

    device: torch.device
    uses_bf16: bool

    def workers(self, config: TrainingSettings) -> WorkerThreads:
        """Threads that compute a microbatch each; a GPU needs one."""
        return WorkerThreads(config.workers if self.device.type == "cpu" else 1)

    def computing(self) -> contextlib.AbstractContextManager[object]:
        """Around everything that a step computes, on all threads."""
        if self.device.type == "cpu" and not self.uses_bf16:
            return without_onednn()
        return contextlib.nullcontext()

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Around a forward pass, on the thread that computes it."""
        if not self.uses_bf16:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def __str__(self) -> str:
        return f"{self.device.type}, {'bf16' if self.uses_bf16 else 'float32'}"


def choose_hardware(config: TrainingSettings, probe: Callable[[], float | None] | None = None) -> Hardware:
    """What the settings name; a ValueError says why it is not available."""
    device = _device("cpu" if config.shard_items else config.device)
    if config.precision != "bf16":
        is_bf16 = config.precision == "auto" and device.type == "cuda"
        return Hardware(device, is_bf16 and torch.cuda.is_bf16_supported())
    if device.type == "cpu":
        times_faster = (probe or bf16_times_faster)()
        if times_faster is None:
            raise ValueError(
                "training.precision = 'bf16': it kills the process on this machine (tried in a "
                "child process): train with --set precision=float32"
            )
        if times_faster < 1:
            raise ValueError(
                f"training.precision = 'bf16': on this machine it is {1 / times_faster:.1f} times "
                "slower than float32: train with --set precision=float32"
            )
        missing = [f"{k}={v}" for k, v in SAFE_ISA.items() if os.environ.get(k) != v]
        if missing:
            raise ValueError(
                "training.precision = 'bf16' works here when oneDNN is told which instructions to "
                f"use before torch is loaded: run `export {' '.join(missing)}` and train again"
            )
    return Hardware(device, True)


def bf16_times_faster() -> float | None:
    """How many times faster a bf16 product is than a float32 one; None where it crashes."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], env=os.environ | SAFE_ISA, capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        return 0.01  # far too slow, however slow exactly
    return float(done.stdout) if done.returncode == 0 else None


def _device(wanted: Literal["auto", "cpu", "cuda", "mps"]) -> torch.device:
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if wanted == "auto":
        wanted = "cuda" if available["cuda"] else "mps" if available["mps"] else "cpu"
    if not available.get(wanted, True):
        raise ValueError(
            f"training.device = {wanted!r}: torch finds none on this machine: "
            "train with --set device=cpu, or install a torch build for it"
        )
    if wanted == "cuda" and "LOCAL_RANK" in os.environ:  # each process has a GPU of its own
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(wanted)
