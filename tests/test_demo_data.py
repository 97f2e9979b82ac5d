"""The embedded data set keeps its promises: order matters, and the best possible score is known."""

import csv
import hashlib
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bert4rec.data import demo
from bert4rec.data.sequences import Sequences
from bert4rec.data.sources import Reading, open_data
from bert4rec.data.splits import Split, leave_one_out

Scorer = Callable[[NDArray[np.int32]], NDArray[np.float64]]


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    folder = tmp_path_factory.mktemp("demo")
    table, items = demo.write_csv(folder)
    return open_data(table, reading=Reading(items=items), out=folder / "prepared")


@pytest.fixture(scope="module")
def split(sequences: Sequences) -> Split:
    return leave_one_out(sequences)


@pytest.fixture(scope="module")
def watched() -> dict[str, list[str]]:
    """The films of every member, in order."""
    films: dict[str, list[str]] = {}
    for user, item, _ in demo.interactions():
        films.setdefault(user, []).append(item)
    return films


def ndcg_and_hit_rate(split: Split, score: Scorer) -> tuple[float, float]:
    """NDCG@10 and HR@10 on test over all items but the seen ones, ties against the model."""
    ranks = []
    for row in range(len(split.test)):
        history, target = split.test.histories[row], split.test.targets[row]
        scores = score(history).copy()
        own = scores[target]
        scores[history] = -np.inf
        ranks.append((scores >= own).sum())
    rank = np.array(ranks)
    return float(np.where(rank <= 10, 1 / np.log2(rank + 1), 0).mean()), float((rank <= 10).mean())


def followers(split: Split, n_back: int) -> NDArray[np.float64]:
    """(V, V) share of j among the items that come at most `n_back` after i, in training."""
    counts = np.zeros((split.n_items, split.n_items))
    for row in range(len(split.train)):
        history = split.train[row]
        for gap in range(1, n_back + 1):
            np.add.at(counts, (history[:-gap], history[gap:]), 1)
    shares: NDArray[np.float64] = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return shares


def test_popularity_is_beaten_by_markov_and_markov_by_reading_further_back(split: Split) -> None:
    """The margins that `make demo` relies on."""
    popularity = split.train_counts / split.train_counts.sum()
    after_one, after_six = followers(split, 1), followers(split, 6)
    pop, pop_hits = ndcg_and_hit_rate(split, lambda history: popularity)
    markov, markov_hits = ndcg_and_hit_rate(split, lambda history: after_one[history[-1]] + popularity * 1e-3)
    window, _ = ndcg_and_hit_rate(split, lambda history: after_six[history[-6:]].sum(0) + popularity * 1e-3)
    best = demo.best_possible()
    assert 0.05 < pop_hits < 0.12
    assert 0.20 < markov_hits < 0.35
    assert 0.60 < best["HR@10"] < 0.80
    assert markov > 2 * pop
    assert window > 2 * markov
    assert best["NDCG@10"] > 1.1 * window
    assert best["NDCG@10"] > 3 * markov


def test_oracle_scores_what_its_probabilities_promise() -> None:
    """The drawn last items must look like draws from the stated probabilities (4 deviations)."""
    best = demo.best_possible()
    for k in (1, 5, 10, 20):
        for metric in ("HR", "NDCG"):
            real, expected = best[f"{metric}@{k}"], best[f"expected {metric}@{k}"]
            assert abs(real - expected) < 4 * 0.5 / np.sqrt(demo.N_USERS)
    assert best["HR@1"] < best["HR@5"] < best["HR@10"] < best["HR@20"]


def test_weights_follow_from_the_visible_history(watched: dict[str, list[str]]) -> None:
    """Computed again from the raw ids of single users: nothing hidden decides what comes next."""
    catalogue = {film["item"]: film for film in demo.items()}
    names = list(catalogue)
    for user in ("u0001", "u0500", "u3000"):
        history = watched[user][:-1]
        club = demo._Club(1)
        for item in history:
            club.watch(np.array([names.index(item)]))
        weights = club.weights()[0]
        assert weights[names.index(watched[user][-1])] > 0
        assert not weights[[names.index(item) for item in history]].any()
        last_seen_at = {catalogue[item]["franchise"]: at for at, item in enumerate(history, start=1)}
        for position, (name, film) in enumerate(catalogue.items()):
            is_later_part = film["franchise"] not in (None, film["title"])
            if not is_later_part or name in history:
                continue
            since = len(history) + 1 - last_seen_at.get(film["franchise"], -99)
            is_next = names[position - 1] in history
            assert (weights[position] > 0) == (is_next and since < len(demo.PULL) - 1)


def test_franchise_parts_are_watched_in_order_and_nothing_twice(watched: dict[str, list[str]]) -> None:
    titles = {film["item"]: film["title"] for film in demo.items()}
    franchise = {film["item"]: film["franchise"] for film in demo.items()}
    parts: dict[str, list[str]] = {}
    for film in demo.items():
        if film["franchise"]:
            parts.setdefault(film["franchise"], []).append(str(film["title"]))
    for history in watched.values():
        assert len(set(history)) == len(history)
        seen: dict[str, list[str]] = {}
        for item in history:
            if franchise[item]:
                seen.setdefault(str(franchise[item]), []).append(str(titles[item]))
        for name, own in seen.items():
            assert own == parts[name][: len(own)]


def test_titles_are_unique_and_readable() -> None:
    titles = [film["title"] for film in demo.items()]
    assert len(set(titles)) == len(titles) == 360
    assert "The Glass Harbour II" in titles
    assert all(title and title == title.strip() for title in titles)


def test_size_lengths_and_times(sequences: Sequences) -> None:
    assert sequences.n_users == 3000
    assert sequences.n_items == 360
    assert 60_000 < sequences.n_interactions < 90_000
    assert sequences.lengths.min() >= 10
    assert sequences.lengths.max() <= 63
    assert sequences.times is not None
    for row in range(0, sequences.n_users, 50):
        times = sequences.times[sequences.offsets[row] : sequences.offsets[row + 1]]
        assert (np.diff(times) > 0).all()


def test_sequences_are_the_interactions(sequences: Sequences) -> None:
    vocabulary = sequences.vocabulary
    owners = np.repeat(np.arange(sequences.n_users), sequences.lengths)
    rebuilt = [
        (sequences.user_ids[owner], vocabulary.raw(token))
        for owner, token in zip(owners, sequences.tokens, strict=True)
    ]
    assert rebuilt == [(user, item) for user, item, _ in demo.interactions()]
    order = list(zip(-vocabulary.counts, vocabulary.ids, strict=True))
    assert all(one < two for one, two in pairwise(order))
    assert vocabulary.title(0) in {film["title"] for film in demo.items()}
    assert sorted(vocabulary.extra) == ["franchise", "genre"]


def test_saved_and_loaded_demo_is_equal(sequences: Sequences, tmp_path: Path) -> None:
    sequences.save(tmp_path / "demo")
    loaded = Sequences.load(tmp_path / "demo")
    assert loaded.fingerprint == sequences.fingerprint
    assert loaded.vocabulary.titles == sequences.vocabulary.titles
    assert loaded.user_ids == sequences.user_ids


# Published scores on the demo data are comparable only while this stays the same, on any machine.
# Changing the generator on purpose means new data: change it here and say so in the changelog.
DIGEST = "b61d53b545c4f9dc597d9054761f6bd8ad45ba2294fce5ff7a68920e4bc81dcb"


def test_data_is_the_same_in_every_process_and_needs_no_torch() -> None:
    assert hashlib.sha256(repr(demo.interactions()).encode()).hexdigest() == DIGEST
    code = (
        "import hashlib, sys; from bert4rec.data import demo, sources; "
        "print(hashlib.sha256(repr(demo.interactions()).encode()).hexdigest()); "
        "sys.exit('torch' in sys.modules)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == DIGEST


def test_csv_holds_the_same_rows(tmp_path: Path) -> None:
    interactions, items = demo.write_csv(tmp_path / "made")
    with interactions.open(encoding="utf-8", newline="") as file:
        rows = [(row["user"], row["item"], int(row["timestamp"])) for row in csv.DictReader(file)]
    assert rows == demo.interactions()
    with items.open(encoding="utf-8", newline="") as file:
        films = [{k: v or None for k, v in row.items()} for row in csv.DictReader(file)]
    assert films == demo.items()
