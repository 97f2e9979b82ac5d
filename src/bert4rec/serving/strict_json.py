"""Reading JSON as RFC 8259 has it, and nothing more.

Python's own reader takes NaN, turns 1e999 into infinity, keeps the last of two equal keys and makes
strings that cannot be written as UTF-8. Each of these would come up later, in a place that cannot
answer with a clear 4xx. So a body is refused here, with a few words that never quote it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable

MAX_DEPTH = 20
MAX_CONTAINERS = 2_000  # lists and objects: the largest request has some 500
MAX_KEYS = 32  # of an object: ours have few, and every unknown one would become an error of its own

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class NotStrictJSON(ValueError):
    """What is wrong with a body, in words that are safe to send back and to log."""


def parse(body: bytes) -> object:
    """The value that `body` stands for; NotStrictJSON says why there is none."""
    if not body:
        raise NotStrictJSON("there is nothing in it")
    try:
        value: object = _DECODER.decode(body.decode("utf-8"))
    except NotStrictJSON:
        raise
    except UnicodeDecodeError as error:
        raise NotStrictJSON(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise NotStrictJSON(f"it ends or goes wrong at character {error.pos}") from None
    except ValueError:  # Python reads no integer of more than 4,300 digits
        raise NotStrictJSON("a number has too many digits") from None
    except RecursionError:
        raise NotStrictJSON(_TOO_DEEP) from None
    # Few brackets cannot nest deeply, and most bodies have few: the walk is for the others.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _refuse_deep_or_many(value)
    if b"\\u" in body and _SURROGATE_ESCAPE.search(body):
        _refuse_lone_surrogates(value)
    return value


_TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"


def _refuse_deep_or_many(value: object) -> None:
    """Level by level and without recursion, so that no body can exhaust the stack."""
    level = [value]
    n_containers = 1
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            # most lists hold ids only, which the set of types finds out faster than a loop
            if not {list, dict}.isdisjoint(map(type, _inside(parent)))
            for child in _inside(parent)
            if type(child) is list or type(child) is dict
        ]
        if not level:
            return
        n_containers += len(level)
        if n_containers > MAX_CONTAINERS:
            raise NotStrictJSON(f"it has more than {MAX_CONTAINERS} lists and objects")
    raise NotStrictJSON(_TOO_DEEP)


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _refuse_lone_surrogates(value: object) -> None:
    """Writing all strings as UTF-8, keys too, is the check itself, and runs in C."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise NotStrictJSON("a string has half of a surrogate pair") from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(pairs) > MAX_KEYS:
        raise NotStrictJSON(f"an object has more than {MAX_KEYS} keys")
    found = dict(pairs)
    if len(found) != len(pairs):
        raise NotStrictJSON("an object has the same key twice")
    return found


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise NotStrictJSON("a number is too large")
    return number


def _no_constant(name: str) -> float:
    raise NotStrictJSON("NaN and Infinity are no JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_finite, parse_constant=_no_constant
)
