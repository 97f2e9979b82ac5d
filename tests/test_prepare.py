"""A table becomes sequences without loss, filters do what they say, and results are reused."""

import csv
import gzip
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from prepared import decoded

from bert4rec.config import load_config
from bert4rec.data.database import connect
from bert4rec.data.filters import Filters
from bert4rec.data.interactions import Interactions
from bert4rec.data.prepare import prepare
from bert4rec.data.sequences import Sequences, fingerprint_of
from bert4rec.data.sources import open_data
from bert4rec.data.table_file import Reading

Row = tuple[str, str, int]


def as_text(histories: dict[Any, list[Any]]) -> dict[str, list[str]]:
    return {str(user): [str(item) for item in items] for user, items in histories.items()}


def id_type_of(ids: list[str]) -> str:
    """The law: integers only if every id is one in its canonical form, and fits 64 bits."""
    matches = (re.fullmatch(r"-?[1-9][0-9]{0,18}|0", text) for text in ids)
    are_integers = all(match and -(2**63) <= int(match[0]) < 2**63 for match in matches)
    return "int" if are_integers else "str"


def in_order(rows: list[Row]) -> dict[str, list[str]]:
    """The law: a user's items by time, ties as in the file."""
    expected: dict[str, list[str]] = {}
    for user, item, _ in sorted(rows, key=lambda row: row[2]):  # stable
        expected.setdefault(user, []).append(item)
    return expected


def prepared(rows: list[Any], folder: Path, **filters: Any) -> Sequences:
    return prepare(Interactions.read(rows), Filters(**filters), out=folder / "prepared")


# Any script, quotes, delimiters, line breaks; only what UTF-8 cannot hold is left out.
any_id = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.integers().map(str),
    st.sampled_from(["007", "7", "NULL", "nan", " ", '"', "a,b", "a\nb", "\r", "#", "\\", "a\0b"]),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    users=st.lists(any_id, min_size=1, max_size=4, unique=True),
    items=st.lists(any_id, min_size=2, max_size=6, unique=True),
    data=st.data(),
)
def test_any_valid_table_survives_a_round_trip(users: list[str], items: list[str], data: st.DataObject) -> None:
    times = st.integers(min_value=-(10**10), max_value=10**10) | st.integers(0, 3)
    row = st.tuples(st.sampled_from(users), st.sampled_from(items), times)
    rows: list[Row] = data.draw(st.lists(row, min_size=3, max_size=30))
    assume(len({item for _, item, _ in rows}) > 1 and len({u for u, _, _ in rows}) < len(rows))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "t.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("user", "item", "timestamp"), *rows])
        sequences = prepare(Interactions.read(folder / "t.csv"), out=folder / "from_file")
        from_tuples = prepare(Interactions.read(rows), out=folder / "from_tuples")
        assert as_text(decoded(sequences)) == in_order(rows)
        assert sequences.fingerprint == from_tuples.fingerprint

        used = sorted({user for user, _, _ in rows})
        assert sequences.user_id_type == id_type_of(used)
        is_number = sequences.user_id_type == "int"
        assert sequences.user_ids == (sorted(map(int, used)) if is_number else used)
        counts = Counter(item for _, item, _ in rows)
        by_count = sorted(counts, key=lambda item: (-counts[item], item))
        assert sequences.vocabulary.ids == by_count
        assert sequences.vocabulary.counts.tolist() == [counts[item] for item in by_count]
        assert sequences.vocabulary.id_type == id_type_of(by_count)


def test_ids_are_exact(tmp_path: Path) -> None:
    """Nothing is trimmed, folded, unescaped or taken for a missing value."""
    ids = ["a", " a", "a ", "A", "\ta", "a\n", "a\r\n", "007", "7", "7.0", "NULL", "null", "nan"]
    ids += [" ", '"', '""', "'", "\\N", "#", "a,b", "é", "e\u0301", "\ufeffa", "本", "a\0b"]
    path = tmp_path / "t.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("user", "item"), *((id_, item) for id_ in ids for item in ids)])
    for source in (path, [(id_, item) for id_ in ids for item in ids]):
        sequences = prepare(Interactions.read(source), out=tmp_path / "out")
        assert decoded(sequences) == dict.fromkeys(ids, ids)


def test_ties_keep_file_order_when_rows_are_many_and_threads_several(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    n = 400_000
    user, item = generator.integers(0, 50, n), generator.integers(0, 1000, n)
    time = generator.integers(0, 3, n)
    path = tmp_path / "t.csv"
    np.savetxt(path, np.stack([user, item, time], 1), "%d", ",", header="user,item,ts", comments="")
    sequences = prepare(Interactions.read(path), out=tmp_path / "out", threads=4)
    order = np.lexsort((time, user))  # stable
    ids = np.array([int(raw) for raw in sequences.vocabulary.ids])
    assert np.array_equal(ids[sequences.tokens], item[order])
    assert np.array_equal(sequences.times, time[order] * 1_000_000)


def test_directory_is_as_described(tmp_path: Path) -> None:
    sequences = prepared([("b", "y", 2), ("b", "x", 1), ("a", "y", 3)], tmp_path)
    found = {path.name for path in (tmp_path / "prepared").iterdir()}
    assert found == {*("meta.json", "tokens.npy", "offsets.npy", "times.npy", "items.parquet", "users.parquet")}
    meta = json.loads((tmp_path / "prepared" / "meta.json").read_text())
    assert (meta["n_users"], meta["n_items"], meta["n_interactions"]) == (2, 2, 3)
    tokens, offsets = sequences.tokens, sequences.offsets
    assert tokens.dtype == np.int32
    assert offsets.dtype == np.int64
    assert isinstance(tokens, np.memmap)
    assert meta["fingerprint"] == fingerprint_of(tokens, offsets, sequences.vocabulary.ids)
    assert list(tmp_path.iterdir()) == [tmp_path / "prepared"]  # no working files are left


ACTIONS = [
    ("u", "a", 1, 5),
    ("u", "b", 2, 1),
    ("u", "a", 3, 5),
    ("u", "c", 4, 4),
    ("v", "a", 1, 5),
    ("v", "b", 2, 5),
    ("w", "a", 1, 5),
]


@pytest.mark.parametrize(
    ("filters", "expected", "dropped"),
    [
        ({}, {"u": "abac", "v": "ab", "w": "a"}, []),
        ({"min_rating": 4.5}, {"u": "aa", "v": "ab", "w": "a"}, [("min_rating=4.5", 2, 0, 1)]),
        ({"drop_repeats": True}, {"u": "abc", "v": "ab", "w": "a"}, [("drop_repeats", 1, 0, 0)]),
        ({"min_item_actions": 2}, {"u": "aba", "v": "ab", "w": "a"}, [("min_item_actions=2", 1, 0, 1)]),
        ({"min_user_actions": 2}, {"u": "abac", "v": "ab"}, [("min_user_actions=2", 1, 1, 0)]),
        ({"k_core": 2}, {"u": "aba", "v": "ab"}, [("k_core=2", 2, 1, 1)]),
        (
            {"min_user_actions": 3, "drop_repeats": True},
            {"u": "abc"},
            [("drop_repeats", 1, 0, 0), ("min_user_actions=3", 3, 2, 0)],
        ),
    ],
)
def test_filters(filters: dict[str, Any], expected: dict[str, str], dropped: list[Any], tmp_path: Path) -> None:
    sequences = prepared(ACTIONS, tmp_path, **filters)
    assert decoded(sequences) == {user: list(items) for user, items in expected.items()}
    assert [tuple(step.values()) for step in sequences.meta["dropped"]] == dropped
    assert sum(sequences.vocabulary.counts) == sequences.n_interactions


def test_k_core_repeats_until_nothing_changes(tmp_path: Path) -> None:
    # Without the chain's end each next link loses its second action; the square stays.
    chain = [(f"u{n}", f"i{m}") for n in range(6) for m in (n, n + 1)]
    square = [(user, item) for user in "xy" for item in "pq"]
    sequences = prepared(chain + square, tmp_path, k_core=2)
    assert decoded(sequences) == {"x": ["p", "q"], "y": ["p", "q"]}


def test_too_little_left_says_which_filter_removed_what(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"items 1, .*min_item_actions=3 dropped 3 rows, 0 users, 2"):
        prepared(ACTIONS, tmp_path, min_item_actions=3)
    with pytest.raises(ValueError, match=r"items 0, .*rows 0 of 7.*k_core=9 dropped 7 rows, 3 users"):
        prepared(ACTIONS, tmp_path, k_core=9)
    assert list(tmp_path.iterdir()) == []


def test_single_actions_are_enough_when_nothing_is_trained(tmp_path: Path) -> None:
    interactions = Interactions.read([("u", "a")])
    sequences = prepare(interactions, out=tmp_path / "p", for_training=False)
    assert decoded(sequences) == {"u": ["a"]}


def test_what_was_not_prepared_for_training_is_checked_before_it_is(tmp_path: Path) -> None:
    interactions = Interactions.read([("u", "a"), ("v", "b")])
    for out in (tmp_path / "p", None):
        prepare(interactions, out=out, cache=tmp_path / "cache", for_training=False)
        with pytest.raises(ValueError, match="one action only"):
            prepare(interactions, out=out, cache=tmp_path / "cache")


def test_only_prepared_data_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(Interactions.read([("u", "a"), ("u", "b")]), out=out)
    prepare(Interactions.read([("u", "a"), ("u", "c")]), out=str(out))  # other data: replaced
    assert decoded(Sequences.load(out)) == {"u": ["a", "c"]}
    note, meta = out / "thesis.txt", out / "meta.json"
    note.write_text("keep me")
    with pytest.raises(ValueError, match="holds other files"):
        prepare(Interactions.read(ACTIONS), out=out)
    assert note.read_text() == "keep me"
    note.unlink()
    for other in ('{"name": "of another program"}', "[1]", '"content_key"', "not JSON"):
        meta.write_text(other)
        with pytest.raises(ValueError, match="holds other files"):
            prepare(Interactions.read(ACTIONS), out=out)
        assert meta.read_text() == other


def test_a_prepared_directory_opens_with_its_own_filters_only(tmp_path: Path) -> None:
    first = prepared(ACTIONS, tmp_path, k_core=2)
    meta = tmp_path / "prepared" / "meta.json"
    content = json.loads(meta.read_text())
    content["filters"]["keep_last"] = None  # a filter that earlier versions had
    meta.write_text(json.dumps(content))
    for overrides in ([], ["data.k_core=2"]):
        config = load_config("default", None, overrides).data
        assert open_data(tmp_path / "prepared", config).fingerprint == first.fingerprint
    with pytest.raises(ValueError, match="filters cannot be changed afterwards"):
        open_data(tmp_path / "prepared", load_config("default", None, ["data.k_core=3"]).data)


def test_duckdb_fetches_no_code() -> None:
    with connect() as connection:
        settings = connection.execute(
            "SELECT name, value FROM duckdb_settings() WHERE name LIKE 'auto%known_extensions'"
        ).fetchall()
    assert dict(settings) == {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}


def test_settings_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for rating in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"(?s)min_rating.*finite.*input_value={rating}"):
            Filters(min_rating=rating)
    with pytest.raises(ValueError, match=r"(?s)k_core.*greater than or equal to 0.*input_value=-1"):
        Filters(k_core=-1)
    with pytest.raises(ValueError, match=r"needs a rating column.*--rating"):
        prepared([row[:3] for row in ACTIONS], tmp_path, min_rating=3)
    with pytest.raises(ValueError, match=r"row 2: the rating .* is 'good', which is not a number"):
        prepared([ACTIONS[0], ("u", "b", 2, "good")], tmp_path, min_rating=3)
    with pytest.raises(ValueError, match=r"memory_limit='lots'.*write 512MB"):
        prepare(Interactions.read(ACTIONS), out=tmp_path / "p", memory_limit="lots")


def test_unused_ratings_may_be_anything(tmp_path: Path) -> None:
    rows = [("u", "a", 1, "good"), ("u", "b", 2, None)]
    assert decoded(prepared(rows, tmp_path)) == {"u": ["a", "b"]}


def test_same_content_is_reused_and_any_change_is_not(tmp_path: Path) -> None:
    path, cache = tmp_path / "t.csv", tmp_path / "cache"
    path.write_text("user,item,other\n1,2,3\n1,3,4\n")
    said: list[str] = []

    def run(**options: Any) -> tuple[Sequences, bool]:
        said.clear()
        interactions = Interactions.read(path, Reading(**options))
        sequences = prepare(interactions, cache=cache, progress=said.append)
        return sequences, any(line.startswith("reused ") for line in said)

    first, was_reused = run()
    assert not was_reused
    again, was_reused = run()
    assert was_reused
    assert again.fingerprint == first.fingerprint
    assert not run(item="other")[1]
    assert len(list(cache.iterdir())) == 2

    for damaged in cache.glob("*/tokens.npy"):
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 1
        damaged.write_bytes(content)
    repaired, was_reused = run()
    assert not was_reused
    assert repaired.fingerprint == first.fingerprint
    for meta in cache.glob("*/meta.json"):
        meta.write_text("[]")
    assert not run()[1]
    path.write_text("user,item,other\n1,2,3\n1,4,4\n")
    changed, was_reused = run()
    assert not was_reused
    assert changed.fingerprint != first.fingerprint


def test_cache_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERT4REC_CACHE", str(tmp_path / "c"))
    prepare(Interactions.read(ACTIONS))
    assert len(list((tmp_path / "c" / "prepared").iterdir())) == 1


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """Ten times the rows may not need much more memory; the benchmark runs 10 million."""
    path = Path(__file__).parents[1] / "benchmarks" / "prepare_memory.py"
    # A child's peak starts at that of its parent on Linux, and pytest may have grown large.
    program = (
        "import json, pathlib, runpy, sys; measure = runpy.run_path(sys.argv[1])['measure']; "
        "print(json.dumps(measure(1_500_000, pathlib.Path(sys.argv[2]), memory_limit='150MB')))"
    )
    command = [sys.executable, "-c", program, str(path), str(tmp_path)]
    measured = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert measured["rows"] == 1_500_000
    assert measured["peak_megabytes"] < 450


def test_ml_1m_ratings_give_the_sequences_of_the_papers(shared_data: Path, tmp_path: Path) -> None:
    """Users and items have other numbers there; titles of items and lengths of users join them."""
    folder = shared_data / "ml-1m"
    sequences = prepare(
        Interactions.read(folder / "ratings.tsv.gz", Reading(on_bad_rows="skip")),
        Filters(min_item_actions=5),
        out=tmp_path / "ml-1m",
    )
    with gzip.open(folder / "items.tsv.gz", "rt", encoding="utf-8") as file:
        paper_id = {row["movie"]: row["item"] for row in csv.DictReader(file, delimiter="\t")}
    ours = [
        tuple(paper_id[sequences.vocabulary.ids[token]] for token in sequences[row]) for row in range(sequences.n_users)
    ]
    theirs: dict[str, list[str]] = {}
    with gzip.open(folder / "ml-1m.txt.gz", "rt") as file:
        for line in file:
            user, item = line.split()
            theirs.setdefault(user, []).append(item)
    assert len(theirs) == 6040
    assert sorted(ours) == sorted(tuple(items) for items in theirs.values())
    assert sequences.meta["dropped"][0]["rows"] == 222
