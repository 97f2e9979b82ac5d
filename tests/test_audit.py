"""The audit counts what was put into the data, and nothing in clean data."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bert4rec.data import audit as audit_module
from bert4rec.data.audit import AuditReport, audit
from bert4rec.data.filters import Filters
from bert4rec.data.interactions import Interactions
from bert4rec.data.prepare import prepare
from bert4rec.data.table_file import Reading


def report(rows: Any, folder: Path) -> AuditReport:
    return audit(prepare(Interactions.read(rows), out=folder / "prepared"))


# Both last items occur in the other's training; no training is after either (20 is not after 20).
CLEAN = [*(("a", "x", 0), ("a", "y", 10), ("a", "z", 20)), *(("b", "z", 1), ("b", "x", 20), ("b", "y", 21))]


def test_clean_data_is_ok(tmp_path: Path) -> None:
    found = report(CLEAN, tmp_path)
    assert {(check.count, check.share) for check in found.checks[:-1]} == {(0, 0)}
    assert {check.severity for check in found.checks[:-1]} == {"ok"}


@pytest.mark.parametrize(
    ("name", "rows", "count", "share"),
    [
        ("users too short", [("c", "x", 1), ("c", "y", 2)], 1, 1 / 3),
        ("tied times at the split", [("c", "x", 1), ("c", "y", 2), ("c", "z", 2)], 1, 1 / 3),
        ("duplicate rows", [("a", "x", 0)], 1, 1 / 7),
        ("repeated pairs", [("a", "x", 0), ("b", "x", 2)], 2, 2 / 8),
        ("test target in own history", [("a", "x", 99)], 1, 1 / 2),
        ("cold test items", [("a", "new", 99)], 1, 1 / 2),
        # Of 6 training rows, 2 lie after the test of `a`, 2 after that of `b`, none after that of
        # `c`: a third, a third and nothing.
        ("training after the test time", [("c", i, 50 + n) for n, i in enumerate("xyz")], 2, 2 / 9),
    ],
)
def test_each_fault_is_counted(name: str, rows: list[Any], count: int, share: float, tmp_path: Path) -> None:
    check = report(CLEAN + rows, tmp_path)[name]
    assert check.count == count
    assert check.share == pytest.approx(share)
    assert check.severity in ("note", "warn")
    assert check.advice


def test_concentration(tmp_path: Path) -> None:
    even = report([("u", str(n)) for n in range(200)], tmp_path).checks[-1]
    assert (even.count, even.share, even.severity) == (2, 0.01, "ok")
    assert "Gini 0.00" in even.advice
    skewed = [("u", str(n)) for n in range(200)] + [("u", "0")] * 800
    assert report(skewed, tmp_path).checks[-1].severity == "warn"


def test_small_blocks_count_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(f"u{n % 7}", f"i{n * n % 5}", n // 9) for n in range(100)]
    whole = report(rows, tmp_path)
    assert whole["repeated pairs"].count > 0
    monkeypatch.setattr(audit_module, "BLOCK", 3)
    assert report(rows, tmp_path) == whole


def test_report_prints_and_exports(tmp_path: Path) -> None:
    found = report([row[:2] for row in CLEAN], tmp_path)
    console = Console(width=150, record=True, quiet=False, file=(tmp_path / "log").open("w"))
    with console.file:
        console.print(found.render())
    text = console.export_text()
    assert "2 users, 3 items, 6 interactions" in text
    assert all(check.name in text for check in found.checks)
    assert "no time column" in text
    assert asdict(found)["checks"][0]["name"] == "users too short"


def test_known_facts_of_real_data(shared_data: Path, tmp_path: Path) -> None:
    interactions = Interactions.read(shared_data / "ml-1m" / "ratings.tsv.gz", Reading(on_bad_rows="skip"))
    ml_1m = audit(prepare(interactions, Filters(min_item_actions=5), out=tmp_path / "ml-1m"))
    assert ml_1m["tied times at the split"].count == 2544
    beauty = audit(prepare(Interactions.read(shared_data / "beauty" / "beauty.txt.gz"), out=tmp_path / "beauty"))
    assert beauty["cold test items"].share == pytest.approx(0.078, abs=0.001)
