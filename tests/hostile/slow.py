"""Clients that are slow on purpose, and how the others fare meanwhile.

`key` is a header that lets a client in.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from hostile.raw import connect, head, post, read_answer
from served import wait_until

DRIBBLE = 0.3  # seconds between bytes
BETWEEN_STARTS = 0.04  # seconds
EVERY = 0.02  # seconds between the requests of a good client
LARGE = json.dumps({"histories": [["item-1"]] * 32, "k": 1000}).encode()
LONG_TITLES = [f"Title {token} {'x' * 3000}" for token in range(60)]  # 6 MB in that answer


def silent(sock: socket.socket, key: str) -> None:
    """Connects and says nothing."""


def dribbles_head(sock: socket.socket, key: str) -> None:
    _dribble(sock, head("GET", "/healthz", key, *["X: y"] * 500))


def dribbles_body(sock: socket.socket, key: str) -> None:
    start = post("/v1/recommend", b" " * 1000, key)
    sock.sendall(start[:-1000])
    _dribble(sock, start[-1000:])


def never_reads(sock: socket.socket, key: str) -> None:
    """Asks for more than the kernel's buffers hold."""
    sock.sendall(post("/v1/recommend/batch", LARGE, key))


def reads_a_little(sock: socket.socket, key: str) -> None:
    sock.sendall(post("/v1/recommend/batch", LARGE, key))
    with contextlib.suppress(OSError):
        while sock.recv(100):
            time.sleep(DRIBBLE)


def asks_on_without_reading(sock: socket.socket, key: str) -> None:
    """One small answer after the other, until they fill up all that lies between."""
    with contextlib.suppress(OSError):
        sock.sendall(head("GET", "/v1/items?limit=20", key) * 120)


Kind = Callable[[socket.socket, str], None]
KINDS: list[Kind] = [silent, dribbles_head, dribbles_body, never_reads, reads_a_little, asks_on_without_reading]


def _dribble(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        for place in range(len(data)):
            sock.sendall(data[place : place + 1])
            time.sleep(DRIBBLE)


def accepted(port: int, socks: list[socket.socket]) -> set[str]:
    """Names of the server's ends of these connections, as far as it has accepted them."""
    ours = {sock.getsockname()[1] for sock in socks}
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, *rest = line.split()
        ports = [int(address.split(":")[1], 16) for address in (local, remote)]
        inode = rest[6]
        if ports[0] == port and ports[1] in ours and inode != "0":
            found.add(f"socket:[{inode}]")
    return found


def open_files(pid: int) -> set[str]:
    """What a process has open: a client that does not read cannot see that it was closed."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(link.readlink()))
    return found


@dataclass
class Latencies:
    """Of a client that sends requests at a steady pace."""

    seconds: list[float] = field(default_factory=list)
    n_failed: int = 0

    def quantile(self, part: float) -> float:
        return sorted(self.seconds)[min(int(len(self.seconds) * part), len(self.seconds) - 1)]


@contextlib.contextmanager
def asking_steadily(port: int, key: str) -> Iterator[Latencies]:
    """In a process of its own, so that the slow clients' threads do not slow it down."""
    found = Latencies()
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=_ask_until_told, args=(theirs, port, key), daemon=True)
    process.start()
    ours.recv()
    try:
        yield found
    finally:
        ours.send("enough")
        found.seconds, found.n_failed = ours.recv()
        process.join()


def _ask_until_told(told: Connection, port: int, key: str) -> None:
    request = post("/v1/recommend", b'{"history": ["item-1", "item-2"]}', key)
    seconds, n_failed = [], 0
    with connect(port) as sock:
        told.send("connected")
        while not told.poll(EVERY):
            began = time.perf_counter()
            sock.sendall(request)
            n_failed += read_answer(sock).status != 200
            seconds.append(time.perf_counter() - began)
    told.send((seconds, n_failed))


def seconds_until_closed(port: int, pid: int, kinds: list[Kind], key: str, within: float) -> list[float]:
    """Open a slow client of each of `kinds`; when did the server have 1, 2, … of them closed?

    Counted from the last one's start. They start one after the other, because they are to be slow,
    not many at once. One that is still open after `within` seconds counts as infinite.
    """
    socks: list[socket.socket] = []
    ends: set[str] = set()
    for kind in kinds:
        socks.append(connect(port, receive_buffer=65536))
        wait_until(lambda: bool(accepted(port, socks[-1:])), "not accepted")
        ends |= accepted(port, socks[-1:])
        threading.Thread(target=kind, args=(socks[-1], key), daemon=True).start()
        time.sleep(BETWEEN_STARTS)
    began = time.monotonic()
    closed: list[float] = []
    while len(closed) < len(kinds) and time.monotonic() - began < within:
        n_closed = len(ends - open_files(pid))
        closed += [time.monotonic() - began] * (n_closed - len(closed))
        time.sleep(0.05)
    for sock in socks:
        sock.close()
    return closed + [float("inf")] * (len(kinds) - len(closed))
