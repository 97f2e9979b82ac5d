"""The long form of the service's tests under load: `make soak`.

    python benchmarks/serving/soak.py [--short] [--only reloads broken ends kills] [--out FILE]

reloads: 100,000 requests while the model is replaced 20 times, every answer compared with the
library's for the version that it names. broken: 30 broken models, none of them taken. ends: 20
times SIGTERM, every accepted request answered. kills: 10 times kill -9, no acknowledged event lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests"))

from served import Served, serve  # noqa: E402
from under_load.kills import kill_often  # noqa: E402
from under_load.known_requests import KnownRequests  # noqa: E402
from under_load.model_link import ModelLink  # noqa: E402
from under_load.reloads import BY_CALL, BY_SIGNAL, BY_WATCH, broken_ways, refuse_under_load, reload_under_load  # noqa: E402
from under_load.shutdowns import stop_often  # noqa: E402

# (to a server that is told of new models, to one that watches for them)
LONG = {"requests": (70_000, 30_000), "reloads": (14, 6), "broken": (23, 7), "ends": 20, "kills": 10, "connections": 16}
SHORT = {"requests": (1_400, 600), "reloads": (4, 2), "broken": (6, 3), "ends": 2, "kills": 2, "connections": 8}
SERVERS = {  # options, ways to change the model, ways to tell of it
    "told": ((), (("switch", BY_SIGNAL), ("overwrite", BY_CALL)), (BY_CALL, BY_SIGNAL)),
    "watching": (("--watch",), (("switch", BY_WATCH), ("overwrite", BY_WATCH)), (BY_WATCH,)),
}
Sizes = dict[str, Any]
Facts = dict[str, Any]


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


@contextlib.contextmanager
def served_link(known: KnownRequests, *options: str) -> Iterator[tuple[Served, ModelLink]]:
    with tempfile.TemporaryDirectory() as folder:
        link = ModelLink(Path(folder))
        link.switch(known.versions[0].recommender)
        with serve(link.path, "--no-access-log", *options) as served:
            yield served, link


def reloads(known: KnownRequests, sizes: Sizes) -> Facts:
    facts = {}
    for number, (name, (options, ways, _)) in enumerate(SERVERS.items()):
        n_reloads = sizes["reloads"][number]
        with served_link(known, *options) as (served, link):
            load = reload_under_load(
                served,
                link,
                known,
                known.versions[0].version,
                n_answers=sizes["requests"][number],
                n_connections=sizes["connections"],
                ways=[ways[n % len(ways)] for n in range(n_reloads)],
                progress=say,
            )
            outcome = asyncio.run(load)
        is_passed = outcome.n_faults == 0 and set(outcome.by_version) == set(known.by_name)
        facts[name] = outcome.as_facts() | {"is_passed": is_passed}
    return facts


def broken(known: KnownRequests, sizes: Sizes) -> Facts:
    facts = {}
    for number, (name, (options, _, told)) in enumerate(SERVERS.items()):
        ways = broken_ways(sizes["broken"][number], told)
        with served_link(known, *options) as (served, link):
            load = refuse_under_load(
                served,
                link,
                known,
                known.versions[0].version,
                broken=ways,
                n_connections=sizes["connections"],
                progress=say,
                n_between=100,
            )
            outcome = asyncio.run(load)
        is_passed = outcome.n_faults == 0 and outcome.n_refused == sizes["broken"][number]
        facts[name] = outcome.as_facts() | {"ways": ways, "is_passed": is_passed}
    return facts


def ends(known: KnownRequests, sizes: Sizes) -> Facts:
    facts = {}
    with tempfile.TemporaryDirectory() as folder:
        several = stop_often(Path(folder), known, n_stops=sizes["ends"], n_connections=16, workers=(1, 2))
        for number, end in enumerate(several, 1):
            facts[str(number)] = end.as_facts() | {"is_passed": end.is_clean}
            say(f"end {number} of {sizes['ends']}: {end}")
    return facts


def kills(known: KnownRequests, sizes: Sizes) -> Facts:
    facts = {}
    for workers in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            for kill in kill_often(Path(folder), n_kills=sizes["kills"] // 2, workers=workers):
                facts[str(len(facts) + 1)] = kill.as_facts() | {"workers": workers, "is_passed": kill.is_harmless}
                say(f"kill {len(facts)} of {sizes['kills']}: {kill}")
    return facts


PARTS: dict[str, Callable[[KnownRequests, Sizes], Facts]] = {
    "reloads": reloads,
    "broken": broken,
    "ends": ends,
    "kills": kills,
}


def total(facts: Facts, name: str) -> Any:
    return sum(part[name] for part in facts.values())


def summary(part: str, facts: Facts) -> str:
    if part == "reloads":
        by_version: Counter[str] = Counter()
        for each in facts.values():
            by_version.update(each["by_version"])
        return (
            f"{total(facts, 'n_answers'):,} requests across {total(facts, 'n_reloads')} reloads: "
            f"{total(facts, 'n_faults')} failed; answers by version {dict(by_version)}"
        )
    if part == "broken":
        return (
            f"{total(facts, 'n_refused')} broken models refused during "
            f"{total(facts, 'n_answers'):,} requests: {total(facts, 'n_faults')} failed"
        )
    if part == "ends":
        slowest = max(each["seconds"] for each in facts.values())
        return (
            f"{len(facts)} times SIGTERM: of {total(facts, 'n_accepted'):,} accepted requests "
            f"{total(facts, 'n_lost')} lost and {total(facts, 'n_cut')} cut, "
            f"{total(facts, 'n_closed')} closed before they were accepted; "
            f"the slowest end took {slowest} s"
        )
    slowest = max(each["seconds_away"] for each in facts.values())
    return (
        f"{len(facts)} times kill -9: of {total(facts, 'n_acknowledged'):,} acknowledged events "
        f"{total(facts, 'n_lost')} lost, {total(facts, 'n_repeated')} repeated; "
        f"killed workers were back within {slowest} s"
    )


def machine() -> Facts:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip() or None,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few of each")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs/results/serving/soak.json")
    arguments = parser.parse_args()
    sizes = SHORT if arguments.short else LONG
    known = KnownRequests()
    result: Facts = machine() | {"settings": sizes}
    for part in arguments.only:
        began = time.monotonic()
        facts = PARTS[part](known, sizes)
        is_passed = all(each["is_passed"] for each in facts.values())
        result[part] = {
            "is_passed": is_passed,
            "summary": summary(part, facts),
            "seconds": round(time.monotonic() - began, 1),
            "parts": facts,
        }
        say(f"{'PASSED' if is_passed else 'FAILED'}  {part}: {result[part]['summary']}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print()
    for part in arguments.only:
        print(f"{'PASSED' if result[part]['is_passed'] else 'FAILED'}  {result[part]['summary']}")
    sys.exit(not all(result[part]["is_passed"] for part in arguments.only))


if __name__ == "__main__":
    main()
