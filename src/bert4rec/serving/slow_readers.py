"""Ending connections whose client takes no answer.

Found by trying granian 2.8.7: a cancelled or failed answer does not close its connection while
bytes of it wait for the client, and pipelined small answers wait without the app ever noticing. The
server keeps its sockets to itself, so they are found among the open files of this process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

OPEN_FILES = Path("/dev/fd")
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class TooSlowToRead(Exception):
    """The client does not take its answer. (No OSError: frameworks take those for a lost one.)"""


def give_up_on_unread_after(seconds: float) -> int:
    """Let the kernel reset connections whose client takes nothing for so long (Linux only).

    The option is set on listening sockets, and connections accepted from now on inherit it. Gives
    how many listen: 0 means that the server does not listen yet.
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    n_listening = 0
    for each in _sockets():
        with contextlib.suppress(OSError):
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                n_listening += 1
                if option is not None:
                    each.setsockopt(socket.IPPROTO_TCP, option, int(seconds * 1000))
    return n_listening


def reset_connection(peer: tuple[str, int]) -> bool:
    """End the connection with `peer` now, with all that still waits to be sent."""
    for each in _sockets():
        with contextlib.suppress(OSError):
            if each.getpeername()[:2] == peer:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                each.shutdown(socket.SHUT_RDWR)
                return True
    return False


def _sockets() -> Iterator[socket.socket]:
    """Duplicates, so that a file closed and opened anew meanwhile is never touched unseen.

    Of sockets only. Closing a duplicate of any other file would take away all locks that this
    process has on it: SQLite would lose what it writes when somebody else looks at its file.
    """
    try:
        numbers = [int(path.name) for path in OPEN_FILES.iterdir()]
    except OSError:
        return
    for number in numbers:
        with contextlib.suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as each:
                    yield each
