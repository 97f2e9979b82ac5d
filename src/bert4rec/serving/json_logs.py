"""Logs: one JSON object per line on stderr.

ASCII only: line breaks, terminal escapes, NUL and lone surrogates in an id or a path become
`\\uXXXX`, so that nobody can forge a line or control the terminal of the reader. Headers and bodies
are never logged, and so neither are keys.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import sys
import time
from typing import Any

MAX_PATH = 200
MAX_TEXT = 20_000  # characters of a message or a traceback

_quoted = json.encoder.encode_basestring_ascii
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JSONLogFormatter(logging.Formatter):
    """`extra={…}` of a log call adds fields to time, level, logger and message."""

    def format(self, record: logging.LogRecord) -> str:
        try:
            message = record.getMessage()
        except Exception:
            message = str(record.msg)
        facts: dict[str, Any] = {
            "time": _time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message[:MAX_TEXT],
        }
        extra = vars(record).keys() - _STANDARD - facts.keys()
        facts |= {name: value for name, value in vars(record).items() if name in extra}
        if record.exc_info and record.exc_info[0] is not None:
            facts["traceback"] = self.formatException(record.exc_info)[-MAX_TEXT:]
        try:
            line = json.dumps(facts, default=str, allow_nan=False)
        except Exception:  # NaN, a cycle, a broken __str__: logging never fails a request
            line = json.dumps({name: ascii(value) for name, value in facts.items()})
        return line.replace("\x7f", "\\u007f")  # JSON allows DEL, terminals act on it


def _time(seconds: float) -> str:
    return f"{_whole_second(int(seconds))}.{int(seconds % 1 * 1000):03d}Z"


@functools.lru_cache(maxsize=4)
def _whole_second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def log_config(level: str = "INFO") -> dict[str, Any]:
    """For logging.config, and for granian, which applies it in its main and worker processes.

    Only warnings of granian: it reports each chunk of a response whose client has gone. It sets
    its logger's level itself, so the handler has to filter.
    """
    ours = {"handlers": ["stderr"], "level": level, "propagate": False}
    granians = {"handlers": ["warnings"], "level": "WARNING", "propagate": False}
    stderr = {"class": "logging.StreamHandler", "stream": "ext://sys.stderr", "formatter": "json"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": f"{__name__}.JSONLogFormatter"}},
        "handlers": {"stderr": stderr, "warnings": stderr | {"level": "WARNING"}},
        "loggers": {"bert4rec": ours, "_granian": granians, "granian.access": dict(granians)},
        "root": {"handlers": ["stderr"], "level": "WARNING"},
    }


def log_access(request_id: str, method: str, path: str, status: int, seconds: float, client: str, n_bytes: int) -> None:
    """A line of the same kind, formatted by hand: the logging module takes ten times as long."""
    line = (
        f'{{"time": "{_time(time.time())}", "level": "info", "logger": "bert4rec.access", '
        f'"request_id": {_quoted(request_id)}, "method": {_quoted(method[:20])}, '
        f'"path": {_quoted(path[:MAX_PATH])}, "status": {status}, "ms": {seconds * 1000:.2f}, '
        f'"client": {_quoted(client)}, "bytes": {n_bytes}}}\n'
    )
    with contextlib.suppress(OSError, ValueError):  # stderr is closed
        sys.stderr.write(line.replace("\x7f", "\\u007f"))
