"""Parse JSON as in RFC 8259, and nothing more.

Python's parser accepts NaN, turns 1e999 into infinity, keeps the last of two equal keys and makes
strings that cannot be encoded as UTF-8. Each of these would fail later, where a clear 4xx is no
longer possible. So such a body is refused here, with a reason that never quotes it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable

MAX_DEPTH = 20
MAX_CONTAINERS = 2_000  # lists and objects; the largest valid request has some 500
MAX_KEYS = 32  # per object: ours have few, and each unknown one would be an error of its own

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class NotStrictJSON(ValueError):
    """What is wrong with a body, in words that are safe to send and to log."""


def parse(body: bytes) -> object:
    """The value of `body`; NotStrictJSON says why it has none."""
    if not body:
        raise NotStrictJSON("it is empty")
    try:
        value: object = _DECODER.decode(body.decode("utf-8"))
    except NotStrictJSON:
        raise
    except UnicodeDecodeError as error:
        raise NotStrictJSON(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise NotStrictJSON(f"it ends or is wrong at character {error.pos}") from None
    except ValueError:  # Python parses no integer of more than 4,300 digits
        raise NotStrictJSON("a number has too many digits") from None
    except RecursionError:
        raise NotStrictJSON(_TOO_DEEP) from None
    # Few brackets cannot nest deeply, and most bodies have few.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _refuse_deep_or_many(value)
    if b"\\u" in body and _SURROGATE_ESCAPE.search(body):
        _refuse_lone_surrogates(value)
    return value


_TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"


def _refuse_deep_or_many(value: object) -> None:
    """Level by level, without recursion, so that no body can exhaust the stack."""
    members: list[Iterable[object]] = [[value]]
    n_containers = 0
    for _ in range(MAX_DEPTH + 1):
        level = [
            each
            for inside in members
            # most lists hold only ids, which the set of types shows faster than a loop
            if not {list, dict}.isdisjoint(map(type, inside))
            for each in inside
            if isinstance(each, list | dict)
        ]
        if not level:
            return
        n_containers += len(level)
        if n_containers > MAX_CONTAINERS:
            raise NotStrictJSON(f"it has more than {MAX_CONTAINERS} lists and objects")
        members = [each.values() if isinstance(each, dict) else each for each in level]
    raise NotStrictJSON(_TOO_DEEP)


def _refuse_lone_surrogates(value: object) -> None:
    """Encode all strings as UTF-8, keys too: that is the check, and it runs in C."""
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
    raise NotStrictJSON("NaN and Infinity are not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_finite, parse_constant=_no_constant)
