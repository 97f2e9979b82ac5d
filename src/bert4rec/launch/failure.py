"""A mistake in the input stays one, however often the processes are started again.

torchrun and Ray start a failed training anew, whatever the reason was. What cannot get better is
written down by the launch that met it, and not tried again by the same launch.
"""

from __future__ import annotations

import json
from pathlib import Path

from bert4rec.durable import write_file
from bert4rec.training.distributed import launch_id

FAILED = ".failed.json"


def remember_failure(out: Path, error: Exception) -> None:
    if out.is_dir():
        write_file(out / FAILED, json.dumps({"launch": launch_id(), "error": str(error)}))


def failure_of(out: Path, launch: str | None) -> str | None:
    """What this launch has already failed of; None if of nothing."""
    path = out / FAILED
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    return str(content["error"]) if content["launch"] == launch else None


def forget_failure(out: Path) -> None:
    (out / FAILED).unlink(missing_ok=True)
