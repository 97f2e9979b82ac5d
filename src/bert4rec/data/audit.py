"""Checks for what would spoil a result on this data, before anyone trains on it.

The test item is a user's last one, as in the leave-one-out split. Everything else counts as
training here, since the validation item is part of the test history.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.table import Table
from rich.text import Text

from bert4rec.data.sequences import Sequences

Severity = Literal["ok", "note", "warn"]
MIN_ACTIONS = 3  # one to learn from, one to validate, one to test
BLOCK = 1 << 20  # interactions per block: memory does not grow with the data


# Per check: the share of what, the share from which it is a warning, and what to do.
CHECKS = {
    "users too short": (
        "users",
        0.5,
        f"fewer than {MIN_ACTIONS} actions: they train but are never held out; "
        f"drop them with min_user_actions={MIN_ACTIONS}",
    ),
    "tied times at the split": (
        "test users",
        0.05,
        "the test item and the one before it have the same time, so file order decides which is last; use finer times",
    ),
    "training after the test time": (
        "training",
        0.1,
        "on average, this share of the training data lies after a user's test item; report the global-time split too",
    ),
    "duplicate rows": ("interactions", 0.01, "the same user, item and time: probably logged twice; use drop_repeats"),
    "repeated pairs": (
        "interactions",
        0.2,
        "the same user and item again: if that is not real behaviour, use drop_repeats",
    ),
    "test target in own history": (
        "test users",
        0.05,
        "never a hit while seen items are excluded: use drop_repeats, or rank seen items too "
        "(evaluation.exclude_seen=false)",
    ),
    "cold test items": (
        "test users",
        0.05,
        "targets that occur nowhere else: no model can exceed an HR of {rest:.3f}; "
        "min_item_actions or k_core drops them",
    ),
}


@dataclass(frozen=True)
class Check:
    """One possible fault: how often it occurs, as a share of what, and what to do."""

    name: str
    count: int
    share: float
    share_of: str
    severity: Severity
    advice: str


@dataclass(frozen=True)
class AuditReport:
    n_users: int
    n_items: int
    n_interactions: int
    checks: tuple[Check, ...]

    def __getitem__(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    def render(self) -> Group:
        """The report as a table for a rich console."""
        size = f"{self.n_users:,} users, {self.n_items:,} items, {self.n_interactions:,} interactions"
        table = Table("", "check", "count", "share", "advice", box=None, pad_edge=False)
        table.columns[2].justify = table.columns[3].justify = "right"
        styles = {"ok": "green", "note": "yellow", "warn": "bold red"}
        for check in self.checks:
            share = f"{check.share:.1%} of {check.share_of}"
            sign = Text(check.severity, styles[check.severity])
            table.add_row(sign, check.name, f"{check.count:,}", share, Text(check.advice))
        return Group(Text(size), table)


def audit(sequences: Sequences) -> AuditReport:
    is_tested = sequences.lengths >= MIN_ACTIONS
    last = sequences.offsets[1:][is_tested] - 1  # flat index of every test item
    targets = np.asarray(sequences.tokens[last], dtype=np.int64)
    n_repeated, n_duplicates, n_seen_targets = _repeats(sequences)
    counts = sequences.vocabulary.counts
    trained = counts - np.bincount(targets, minlength=sequences.n_items)
    n_rows = sequences.n_interactions
    checks = (
        _check("users too short", int((~is_tested).sum()), sequences.n_users),
        *_time_checks(sequences, last, n_duplicates),
        _check("repeated pairs", n_repeated, n_rows),
        _check("test target in own history", n_seen_targets, len(last)),
        _check("cold test items", int((trained[targets] == 0).sum()), len(last)),
        _concentration(counts),
    )
    return AuditReport(sequences.n_users, sequences.n_items, n_rows, checks)


def _check(name: str, count: int, total: int, share: float | None = None) -> Check:
    share_of, warn_from, advice = CHECKS[name]
    share = count / max(total, 1) if share is None else share
    severity: Severity = "ok" if count == 0 else "warn" if share >= warn_from else "note"
    return Check(name, count, share, share_of, severity, advice.format(rest=1 - share) * (count > 0))


def _time_checks(sequences: Sequences, last: NDArray[np.int64], n_duplicates: int) -> list[Check]:
    if sequences.times is None:
        advice = "file order counts as time order, and leakage cannot be measured"
        return [Check("no time column", 1, 1.0, "data", "note", advice)]
    times = np.asarray(sequences.times)
    test_times, train_times = times[last], np.sort(np.delete(times, last))
    # The mean over test users of the share of training interactions after their test time.
    n_until = np.searchsorted(train_times, test_times, side="right")
    later = float(1 - n_until.mean() / len(train_times)) if len(last) else 0.0
    return [
        _check("tied times at the split", int((test_times == times[last - 1]).sum()), len(last)),
        _check("training after the test time", math.ceil(later * len(train_times)), len(train_times), later),
        _check("duplicate rows", n_duplicates, len(times)),
    ]


def _repeats(sequences: Sequences) -> tuple[int, int, int]:
    """Counts of repeated (user, item) pairs, of those with equal times, of seen test items."""
    n_repeated = n_duplicates = n_seen_targets = 0
    for first_user, last_user in sequences.user_blocks(BLOCK):
        start, end = sequences.offsets[first_user], sequences.offsets[last_user]
        lengths = np.diff(sequences.offsets[first_user : last_user + 1])
        user = np.repeat(np.arange(len(lengths)), lengths)
        token = np.asarray(sequences.tokens[start:end])
        is_last = np.zeros(end - start, dtype=bool)
        is_last[(np.cumsum(lengths) - 1)[lengths >= MIN_ACTIONS]] = True
        # The sort is stable and keeps time order within a pair, so equal times are neighbours.
        order = np.lexsort((token, user))
        user, token, is_last = user[order], token[order], is_last[order]
        is_repeat = (user[1:] == user[:-1]) & (token[1:] == token[:-1])
        n_repeated += int(is_repeat.sum())
        n_seen_targets += int((is_repeat & is_last[1:]).sum())
        if sequences.times is not None:
            time = np.asarray(sequences.times[start:end])[order]
            n_duplicates += int((is_repeat & (time[1:] == time[:-1])).sum())
    return n_repeated, n_duplicates, n_seen_targets


def _concentration(counts: NDArray[np.int64]) -> Check:
    """The share of the most popular 1 % of items, and the Gini coefficient over all items."""
    ascending = np.sort(counts).astype(np.float64)
    n = len(ascending)
    gini = float(2 * (np.arange(1, n + 1) * ascending).sum() / (n * ascending.sum()) - (n + 1) / n)
    n_top = max(1, n // 100)
    share = float(ascending[-n_top:].sum() / ascending.sum())
    severity: Severity = "warn" if share > 0.5 else "note" if gini > 0.6 else "ok"
    advice = f"Gini {gini:.2f}; compare with the popularity baseline, and look at coverage"
    return Check("popularity of the top 1% items", n_top, share, "interactions", severity, advice)
