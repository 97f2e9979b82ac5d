"""Bodies far over the limit, many at once, and what they do to the server's memory."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import Counter
from pathlib import Path

from hostile.raw import Answer, connect, head, read_answer

PIECE = 65_536
JSON = "Content-Type: application/json"


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def megabytes(pid: int, what: str = "VmHWM") -> float:
    """The most memory that a process had since reset_peak, or (VmRSS) has now."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def push(port: int, n_bytes: int, *, is_chunked: bool, is_json: bool = True) -> Answer:
    """Send as much of a body of `n_bytes` as the server takes."""
    length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {n_bytes}"
    kind = JSON if is_json else "Content-Type: text/plain"
    piece = b" " * PIECE
    if is_chunked:
        piece = b"%x\r\n%b\r\n" % (PIECE, piece)
    with connect(port) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(head("POST", "/v1/recommend", length, kind))
            for _ in range(n_bytes // PIECE):
                sock.sendall(piece)
        return read_answer(sock)


def push_many(port: int, n: int, n_bytes: int) -> Counter[int]:
    """`n` at once, half of them chunked; how often each status came (0: closed unread)."""
    statuses: Counter[int] = Counter()

    def one(number: int) -> None:
        answer = push(port, n_bytes, is_chunked=number % 2 == 0, is_json=number % 10 != 9)
        statuses[answer.status] += 1

    threads = [threading.Thread(target=one, args=(number,)) for number in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses
