"""Requests made up by the thousand: from the API's own description, and by spoiling good ones."""

from __future__ import annotations

import copy
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

WITHIN = 10.0  # seconds; an answer that takes longer is a hang
ERROR_BODY = 4096


@dataclass
class Outcome:
    by_status: Counter[int] = field(default_factory=Counter)
    n_hangs: int = 0
    largest_error: int = 0
    slowest: float = 0.0
    faults: list[str] = field(default_factory=list)  # the first ones

    @property
    def total(self) -> int:
        return self.by_status.total() + self.n_hangs

    @property
    def n_5xx(self) -> int:
        return sum(n for status, n in self.by_status.items() if status >= 500)

    def note(self, status: int, n_bytes: int, seconds: float) -> None:
        self.by_status[status] += 1
        self.slowest = max(self.slowest, seconds)
        if status >= 400:
            self.largest_error = max(self.largest_error, n_bytes)

    def fault(self, what: str) -> None:
        if len(self.faults) < 20:
            self.faults.append(what)

    def as_json(self) -> dict[str, object]:
        classes: Counter[str] = Counter()
        for status, n in self.by_status.items():
            classes[f"{status // 100}xx"] += n
        return {
            "total": self.total,
            "by_class": dict(sorted(classes.items())),
            "by_status": {str(status): n for status, n in sorted(self.by_status.items())},
            "n_5xx": self.n_5xx,
            "n_hangs": self.n_hangs,
            "largest_error_body": self.largest_error,
            "slowest_seconds": round(self.slowest, 3),
            "faults": self.faults,
        }


def by_description(url: str, n_each: int, number: int, headers: dict[str, str]) -> Outcome:
    """`n_each` good and as many bad cases for each operation of /openapi.json.

    Answers have to fit the description too: known statuses, right content types and bodies. Left
    out is that all valid data are accepted (to JSON Schema 1.0 is an integer, to us it is not an
    id), and that all invalid queries are refused (written down, null and [] are text).
    414 is the HTTP server's own, for an address of more than 65,534 bytes.
    """
    outcome = Outcome()
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers)
    session = requests.Session()
    session.trust_env = False
    for operation in schema.get_all_operations():
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            cases = operation.ok().as_strategy(generation_mode=mode)

            @seed(number)
            @settings(
                max_examples=n_each,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(cases)
            def ask(case: Case) -> None:
                began = time.monotonic()
                try:
                    answer = case.call(timeout=WITHIN, session=session, headers=headers)
                except requests.Timeout:
                    outcome.n_hangs += 1
                    return
                seconds = time.monotonic() - began
                outcome.note(answer.status_code, len(answer.content), seconds)
                if answer.status_code == 414:
                    return
                left_out = [positive_data_acceptance]
                if case.method == "GET":
                    left_out.append(negative_data_rejection)
                try:
                    case.validate_response(answer, excluded_checks=left_out)
                except FailureGroup as failures:
                    for failure in failures.exceptions:
                        outcome.fault(f"{case.operation.label}: {failure}"[:500])

            try:
                ask()
            except Unsatisfiable:  # nothing can be wrong with a request without parts
                continue
    session.close()
    return outcome


HOSTILE: list[object] = [
    None, True, 0, -1, 1.5, 1e308, 2**63, -(2**63) - 1, 10**400, "", "\x00", "\u202e\n\x1b[2J",
    "item-1", "\U0001f3ac", "x" * 1001, [], {}, [[]], {"a": 1}, "' OR 1=1 --", "{{7*7}}",
    "../../etc/passwd", "<script>alert(1)</script>", "NaN", [None] * 5, ["item-1"] * 1001,
]  # fmt: skip
SPLINTERS = [
    b"NaN", b"1e999", b"-Infinity", rb'"\ud800"', b"\xff", b"\xed\xa0\x80", b"[" * 50, b"]" * 50,
    b"{" * 2000, b'"', b"\\", b",", b":", b"\x00", b"9" * 5000, b'"k":1,"k":2', b"\xef\xbb\xbf",
]  # fmt: skip
GOOD: list[tuple[str, dict[str, object]]] = [
    ("/v1/recommend", {"history": ["item-1", 2], "k": 5, "exclude_seen": True, "allow": None,
                       "block": ["item-3"], "model": None}),
    ("/v1/recommend/batch", {"histories": [["item-1"], ["item-2", "item-3"]], "k": 3}),
    ("/v1/explain", {"history": ["item-1", "item-2"], "items": ["item-3"], "attention": True}),
    ("/v1/events", {"events": [{"user": "u", "item": "item-1", "time": 1.5, "id": "e"}]}),
]  # fmt: skip


def spoiled(number: int) -> Iterator[tuple[str, bytes]]:
    """Good bodies with a part replaced by something hostile, as JSON or byte by byte."""
    chance = random.Random(number)
    while True:
        path, good = chance.choice(GOOD)
        value = json.loads(json.dumps(good))
        for _ in range(chance.randrange(3)):
            _replace_part(value, chance)
        body = json.dumps(value, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
        for _ in range(chance.randrange(3)):
            body = _splintered(body, chance)
        yield path, body


def _replace_part(value: object, chance: random.Random) -> None:
    places: list[tuple[dict[str, object] | list[object], str | int]] = []
    waiting = [value]
    while waiting:
        parent = waiting.pop()
        if isinstance(parent, dict):
            places += [(parent, key) for key in parent]
            waiting += parent.values()
        elif isinstance(parent, list):
            places += [(parent, place) for place in range(len(parent))]
            waiting += parent
    if places:
        parent, place = chance.choice(places)
        parent[place] = copy.deepcopy(chance.choice(HOSTILE))  # type: ignore[index,call-overload]


def _splintered(body: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(body) + 1)
    changes: list[Callable[[], bytes]] = [
        lambda: body[:at],
        lambda: body[:at] + chance.choice(SPLINTERS) + body[at:],
        lambda: body[:at] + chance.randbytes(chance.randrange(1, 9)) + body[at + 4 :],
        lambda: body[at:] + body[:at],
    ]
    return chance.choice(changes)()


def by_hand(url: str, n: int, number: int, headers: dict[str, str]) -> Outcome:
    outcome = Outcome()
    json_headers = {"content-type": "application/json", **headers}
    with httpx.Client(base_url=url, headers=json_headers, timeout=WITHIN, trust_env=False) as client:
        for (path, body), _ in zip(spoiled(number), range(n), strict=False):
            began = time.monotonic()
            try:
                answer = client.post(path, content=body)
            except httpx.TimeoutException:
                outcome.n_hangs += 1
                continue
            outcome.note(answer.status_code, len(answer.content), time.monotonic() - began)
            if answer.status_code >= 500:
                outcome.fault(f"{path} {body[:300]!r}: {answer.text[:200]}")
    return outcome
