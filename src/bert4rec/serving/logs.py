"""Logs as one JSON object a line on stderr.

Only ASCII leaves: line breaks, terminal escapes, NUL and half surrogates in an id or a path become
`\\uXXXX`, so nobody can forge a line or play with the terminal of who reads it. Headers and bodies
are never logged, so neither are keys.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import logging.config
import sys
import time
from typing import Any

MAX_PATH = 200
MAX_TEXT = 20_000  # characters of a message or a traceback

_quoted = json.encoder.encode_basestring_ascii
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JSONLines(logging.Formatter):
    """`extra={…}` of a log call become fields beside time, level, logger and message."""

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
        for name, value in vars(record).items():
            if name not in _STANDARD and name not in facts:
                facts[name] = value
        if record.exc_info and record.exc_info[0] is not None:
            facts["traceback"] = self.formatException(record.exc_info)[-MAX_TEXT:]
        try:
            line = json.dumps(facts, default=str, allow_nan=False)
        except Exception:  # NaN, a loop, a broken __str__: a log call never fails a request
            line = json.dumps({name: ascii(value) for name, value in facts.items()})
        return line.replace("\x7f", "\\u007f")  # JSON leaves DEL alone, terminals do not


def _time(seconds: float) -> str:
    return f"{_whole_second(int(seconds))}.{int(seconds % 1 * 1000):03d}Z"


@functools.lru_cache(maxsize=4)
def _whole_second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def log_config(level: str = "INFO") -> dict[str, Any]:
    """For logging.config, and for granian, which applies it in its main and worker processes.

    Of granian only warnings: it reports each piece of an answer whose client went away. It sets
    its logger's level itself, so the handler has to hold back the rest.
    """
    ours = {"handlers": ["stderr"], "level": level, "propagate": False}
    granians = {"handlers": ["warnings"], "level": "WARNING", "propagate": False}
    stderr = {
        "class": "logging.StreamHandler",
        "stream": "ext://sys.stderr",
        "formatter": "json",
    }
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": f"{__name__}.JSONLines"}},
        "handlers": {"stderr": stderr, "warnings": stderr | {"level": "WARNING"}},
        "loggers": {"bert4rec": ours, "_granian": granians, "granian.access": dict(granians)},
        "root": {"handlers": ["stderr"], "level": "WARNING"},
    }


def configure_logging(level: str = "INFO") -> None:
    logging.config.dictConfig(log_config(level))


def log_access(
    request_id: str, method: str, path: str, status: int, seconds: float, client: str, n_bytes: int
) -> None:
    """The same kind of line, put together by hand: logging's own way takes ten times as long."""
    line = (
        f'{{"time": "{_time(time.time())}", "level": "info", "logger": "bert4rec.access", '
        f'"request_id": {_quoted(request_id)}, "method": {_quoted(method[:20])}, '
        f'"path": {_quoted(path[:MAX_PATH])}, "status": {status}, "ms": {seconds * 1000:.2f}, '
        f'"client": {_quoted(client)}, "bytes": {n_bytes}}}\n'
    )
    with contextlib.suppress(OSError, ValueError):  # nobody reads stderr any more
        sys.stderr.write(line.replace("\x7f", "\\u007f"))
