"""One local worker: `python -m bert4rec.batch.worker THREADS`, which `pool` starts and talks to.

It reads the job and then numbers of parts, a line each, and answers in lines of JSON. When its
input ends without `stop` whoever asked is gone, and so are we, in the middle of whatever it is.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from typing import TextIO

STOP = "stop"
EXIT_ABANDONED = 3


def main() -> None:
    n_threads = int(sys.argv[1])
    # What a library may print must not come between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    try:
        _work(lines, answers, n_threads)
    except (ValueError, OSError) as error:  # no other worker would do better
        _answer(answers, error=str(error))
        sys.exit(1)


def _listen(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line.strip())
        if line.strip() == STOP:
            return
    os._exit(EXIT_ABANDONED)


def _work(lines: queue.SimpleQueue[str], answers: TextIO, n_threads: int) -> None:
    import torch

    from bert4rec.batch.parts import Job, PartWriter

    torch.set_num_threads(n_threads)
    writer = PartWriter(Job.from_json(lines.get()))
    while (line := lines.get()) != STOP:
        writer.write(int(line), lambda n_done: _answer(answers, n_done=n_done))
        _answer(answers, is_finished=True)


def _answer(answers: TextIO, **facts: object) -> None:
    answers.write(json.dumps(facts) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
