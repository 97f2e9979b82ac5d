"""Many files, and many workers, give what one file on one machine gives, byte for byte."""

import csv
import itertools
import os
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from prepared import bytes_of
from toys import random_histories

from bert4rec.data import remote, splits
from bert4rec.data.filters import Filters
from bert4rec.data.interactions import Interactions, names_of
from bert4rec.data.prepare import prepare
from bert4rec.data.prepared_files import write_range
from bert4rec.data.sequences import Sequences
from bert4rec.data.table_file import Reading

N_FILES = 5


def rows(n: int = 400, seed: int = 0) -> dict[str, Any]:
    """Users who differ in how much they do, and times with ties."""
    generator = np.random.default_rng(seed)
    return {
        "user": (generator.pareto(1, n) * 3).astype(np.int64) % 40 - 5,
        "item": (generator.pareto(1, n) * 4).astype(np.int64) % 60,
        "timestamp": 1_600_000_000 + generator.integers(0, 50, n),
        "rating": generator.integers(1, 6, n),
    }


def as_text(columns: dict[str, Any]) -> dict[str, Any]:
    """Ids that are no numbers; one user, with a single action, is all that keeps users from it."""
    users = columns["user"].astype(str).astype(object)
    users[7] = "x"
    items = [f"é{item}" for item in columns["item"]]
    return columns | {"user": users.tolist(), "item": items}


def dated(columns: dict[str, Any]) -> dict[str, Any]:
    return columns | {"timestamp": columns["timestamp"].astype("datetime64[s]").astype("datetime64[us]")}


KINDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "integers": lambda columns: columns,
    "text": as_text,
    "dates": dated,
}


def write_files(folder: Path, columns: dict[str, Any], n_files: int = N_FILES) -> Path:
    folder.mkdir()
    frame = pl.DataFrame(columns)
    bounds = np.linspace(0, len(frame), n_files + 1).astype(int).tolist()
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        frame[start:end].write_parquet(folder / f"{n}.parquet")
    return folder


class Here:
    """Workers that are this process."""

    n_workers = 3

    def map(self, task: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [task(*each) for each in arguments]


IN_PROCESS = Here()


@pytest.mark.parametrize("kind", KINDS)
def test_parquet_files_give_the_sequences_of_one_text(kind: str, tmp_path: Path) -> None:
    columns = KINDS[kind](rows())
    folder = write_files(tmp_path / "files", columns)
    times = columns["timestamp"]
    seconds = times.astype("datetime64[s]").astype(np.int64) if kind == "dates" else times
    with (tmp_path / "t.csv").open("w", encoding="utf-8", newline="") as file:
        lines = zip(columns["user"], columns["item"], seconds, strict=True)
        csv.writer(file).writerows([("user", "item", "timestamp"), *lines])
    prepare(Interactions.read(folder), out=tmp_path / "from_files")
    prepare(Interactions.read(tmp_path / "t.csv"), out=tmp_path / "from_text")
    ours, theirs = bytes_of(tmp_path / "from_files"), bytes_of(tmp_path / "from_text")
    del ours["meta.json"], theirs["meta.json"]
    assert ours == theirs


@pytest.mark.parametrize(
    ("kind", "filters"),
    [
        ("integers", {}),
        ("integers", {"min_rating": 3, "drop_repeats": True, "min_item_actions": 3}),
        ("text", {"k_core": 4}),
        ("text", {"min_user_actions": 2}),
        ("dates", {}),
    ],
)
def test_many_workers_write_the_same_bytes(kind: str, filters: dict[str, Any], tmp_path: Path) -> None:
    interactions = Interactions.read(write_files(tmp_path / "files", KINDS[kind](rows())))
    prepare(interactions, Filters(**filters), out=tmp_path / "one")
    prepare(interactions, Filters(**filters), out=tmp_path / "many", workers=IN_PROCESS)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "many")
    if kind == "text":  # the filters leave numbers only: users are in another order than before
        assert Sequences.load(tmp_path / "many").user_id_type == "int"


def test_bad_rows_are_found_in_whichever_file(tmp_path: Path) -> None:
    columns = as_text(rows())
    columns["user"][5 * 80 - 2] = None  # the last row but one of the last file
    columns["user"][3] = ""
    columns["item"][3] = "never seen elsewhere"
    folder = write_files(tmp_path / "files", columns)
    for workers in (None, IN_PROCESS):
        with pytest.raises(ValueError, match=r"0\.parquet, row 4: the user .* such rows in all: 2"):
            prepare(Interactions.read(folder), out=tmp_path / "p", workers=workers)
    skipping = Interactions.read(folder, Reading(on_bad_rows="skip"))
    one = prepare(skipping, out=tmp_path / "one")
    prepare(skipping, out=tmp_path / "many", workers=IN_PROCESS)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "many")
    assert one.meta["dropped"] == [{"step": "blank user", "rows": 2, "users": 0, "items": 1}]


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    folder = tmp_path / "clicks"
    for path, item in (("day=2/a.parquet", 3), ("day=1/b.parquet", 2), ("day=1/a.parquet", 1)):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        pl.DataFrame({"user": [1], "item": [item]}).write_parquet(folder / path)
    (folder / "_temporary").mkdir()
    (folder / "_temporary" / "c.parquet").write_bytes(b"of another program")
    (folder / "_SUCCESS").write_bytes(b"")
    sequences = prepare(Interactions.read(folder), out=tmp_path / "p")
    assert [sequences.vocabulary.raw(token) for token in sequences[0]] == [1, 2, 3]
    assert sequences.user_ids == [1]


def test_files_that_differ(tmp_path: Path) -> None:
    """Other types are read as text; what is missing or damaged is named."""
    folder = write_files(tmp_path / "files", rows())
    expected = prepare(Interactions.read(folder), out=tmp_path / "a")
    odd = folder / "3.parquet"
    whole = odd.read_bytes()
    pl.read_parquet(odd).with_columns(pl.col("user").cast(pl.String)).write_parquet(odd)
    interactions = Interactions.read(folder)
    assert prepare(interactions, out=tmp_path / "b").fingerprint == expected.fingerprint
    with pytest.raises(ValueError, match=r"3\.parquet has other columns or types"):
        prepare(interactions, out=tmp_path / "c", workers=IN_PROCESS)

    pl.read_parquet(odd).drop("timestamp").write_parquet(odd)
    with pytest.raises(ValueError, match=r"a time column and .*3\.parquet has none"):
        Interactions.read(folder)
    pl.read_parquet(odd).rename({"item": "what"}).write_parquet(odd)
    with pytest.raises(ValueError, match=r"3\.parquet has no item column"):
        Interactions.read(folder)
    middle = len(whole) // 2
    odd.write_bytes(whole[:4] + bytes(middle) + whole[middle + 4 :])  # the footer is intact
    for workers in (None, IN_PROCESS):
        with pytest.raises(ValueError, match=r"3\.parquet cannot be read"):
            prepare(Interactions.read(folder), out=tmp_path / "d", workers=workers)


def test_workers_are_refused_what_they_cannot_do(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("user,item\n1,2\n1,3\n")
    with pytest.raises(ValueError, match=r"t\.csv is not a plain Parquet file"):
        prepare(Interactions.read(tmp_path / "t.csv"), out=tmp_path / "p", workers=IN_PROCESS)
    folder = write_files(tmp_path / "files", {"user": [1, 1, 2], "item": [1, 2, 1]}, n_files=1)
    with pytest.raises(ValueError, match="3 workers and only 2 users"):
        prepare(Interactions.read(folder), out=tmp_path / "p", workers=IN_PROCESS)
    assert not (tmp_path / "p").exists()


def test_many_names_are_cut_short(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "files", rows(60), n_files=30)
    interactions = Interactions.read(folder)
    assert names_of(interactions.tables, are_short=True) == "0.parquet, …, 9.parquet (30 files)"


def test_an_array_in_ranges_is_the_array_in_one(tmp_path: Path) -> None:
    values = np.arange(10, dtype=np.int32)
    np.save(tmp_path / "whole.npy", values)
    np.lib.format.open_memmap(tmp_path / "ranges.npy", "w+", np.int32, (10,))
    for start, end in ((6, 10), (0, 6)):
        write_range(tmp_path / "ranges.npy", start, values[start:end])
    assert bytes_of(tmp_path)["whole.npy"] == bytes_of(tmp_path)["ranges.npy"]


@pytest.mark.parametrize("split", splits.SPLITS)
def test_a_split_is_the_same_in_blocks(split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = random_histories(40)
    n = sequences.n_interactions
    sequences.times = np.random.default_rng(0).integers(0, 1000, n)
    for start, end in zip(sequences.offsets[:-1], sequences.offsets[1:], strict=True):
        sequences.times[start:end].sort()
    whole = splits.SPLITS[split](sequences)
    monkeypatch.setattr(splits, "BLOCK", 7)
    blocks = splits.SPLITS[split](sequences)
    trained = np.concatenate([whole.train[i] for i in range(len(whole.train))])
    assert whole.train_counts.tolist() == np.bincount(trained, minlength=30).tolist()
    assert blocks.train_counts.tolist() == whole.train_counts.tolist()
    assert blocks.train.ends.tolist() == whole.train.ends.tolist()
    assert blocks.test.targets.tolist() == whole.test.targets.tolist()


def test_nothing_remote_is_read_unless_it_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"s3://bucket/\*\.parquet is not on this.*--allow-remote"):
        Interactions.read("s3://bucket/*.parquet")
    with pytest.raises(ValueError, match=r"ftp://host/a\.parquet: addresses that can be read begin"):
        Interactions.read("ftp://host/a.parquet", Reading(allow_remote=True))
    (tmp_path / "t.csv").write_text("user,item\n1,2\n")
    with pytest.raises(ValueError, match="table of items must be on this machine"):
        Interactions.read(tmp_path / "t.csv", Reading(items="s3://bucket/items.csv", allow_remote=True))


def test_a_missing_extension_is_not_fetched_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where DuckDB keeps its extensions
    monkeypatch.setenv("BERT4REC_ALLOW_REMOTE", "1")
    with pytest.raises(ValueError, match=r"no httpfs extension .*data install-httpfs"):
        Interactions.read("https://127.0.0.1/a.parquet")
    assert list(tmp_path.iterdir()) == []


def test_s3_settings_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    assert remote.s3_settings() == {}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "it's")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    assert remote.s3_settings() == {
        "KEY_ID": "'it''s'",
        "REGION": "'eu-west-1'",
        "ENDPOINT": "'127.0.0.1:9000'",
        "URL_STYLE": "'path'",
        "USE_SSL": "false",
    }


def test_the_made_up_interactions_can_be_learnt_from(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = Path(__file__).parents[1] / "benchmarks" / "scale" / "synthetic.py"
    made = runpy.run_path(str(path), run_name="synthetic")
    size = made["Size"](users=100, items=200, interactions=20_000, files=4)
    for folder in ("a", "b"):
        made["write"](size, tmp_path / folder)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
    sequences = prepare(Interactions.read(tmp_path / "a"), out=tmp_path / "p")
    assert sequences.n_interactions == 20_000
    assert sequences.n_users == 100
    follows = np.zeros((200, 200), dtype=np.int64)
    for user in range(sequences.n_users):
        np.add.at(follows, (sequences[user][:-1], sequences[user][1:]), 1)
    # One guess for each item is right more often than the most popular item ever is.
    assert follows.max(1).sum() / follows.sum() > 0.5
    assert sequences.vocabulary.counts.max() / 20_000 < 0.1
