"""Every source gives the same sequences, and what cannot be read says so in one sentence."""

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pytest
from prepared import decoded

from bert4rec.data.columns import NAMES, require_column
from bert4rec.data.interactions import Interactions
from bert4rec.data.prepare import prepare
from bert4rec.data.sequences import Sequences
from bert4rec.data.table_file import Reading

# "007" and "7" are two users, ids hold any script, and a tie in time is not in item order.
ROWS = [
    ("007", "ägypten", 1_600_000_300),
    ("7", "z", 1_600_000_100),
    ("007", "z", 1_600_000_100),
    ("007", "本", 1_600_000_100),
    ("7", "ägypten", 1_600_000_050),
]
EXPECTED = {"007": ["z", "本", "ägypten"], "7": ["ägypten", "z"]}
HEADER = ("User_ID", "movieId", "timestamp")


def read(source: Any, folder: Path, **options: Any) -> Sequences:
    return prepare(Interactions.read(source, Reading(**options)), out=folder / "prepared")


def write_text(path: Path, delimiter: str, header: bool = True) -> Path:
    lines = ([HEADER] if header else []) + [tuple(map(str, row)) for row in ROWS]
    path.write_text("".join(delimiter.join(line) + "\n" for line in lines), encoding="utf-8")
    return path


def write_json(path: Path, as_list: bool = False) -> Path:
    records = [dict(zip(HEADER, row, strict=True)) for row in ROWS]
    text = json.dumps(records) if as_list else "\n".join(map(json.dumps, records))
    path.write_text(text, encoding="utf-8")
    return path


def gzipped(path: Path) -> Path:
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    return packed


def pandas_frame() -> pd.DataFrame:
    return pd.DataFrame(ROWS, columns=list(HEADER))


def polars_frame() -> pl.DataFrame:
    return pl.DataFrame(ROWS, schema=list(HEADER), orient="row")


def parquet(path: Path) -> Path:
    polars_frame().write_parquet(path)
    return path


def dated_frame() -> pd.DataFrame:
    frame = pandas_frame()
    return frame.assign(timestamp=pd.to_datetime(frame["timestamp"], unit="s", utc=True))


SOURCES: dict[str, Callable[[Path], Any]] = {
    "csv": lambda folder: write_text(folder / "t.csv", ","),
    "csv with semicolons": lambda folder: write_text(folder / "t.csv", ";"),
    "tsv": lambda folder: write_text(folder / "t.tsv", "\t"),
    "tsv called csv": lambda folder: write_text(folder / "t.csv", "\t"),
    "headerless csv": lambda folder: write_text(folder / "t.csv", ",", header=False),
    "headerless dat": lambda folder: write_text(folder / "t.dat", "::", header=False),
    "headerless blanks": lambda folder: write_text(folder / "t.txt", " ", header=False),
    "csv.gz": lambda folder: gzipped(write_text(folder / "t.csv", ",")),
    "dat.gz": lambda folder: gzipped(write_text(folder / "t.dat", "::", header=False)),
    "name with a pattern": lambda folder: write_text(folder / "t[1]*.csv", ","),
    "jsonl": lambda folder: write_json(folder / "t.jsonl"),
    "ndjson.gz": lambda folder: gzipped(write_json(folder / "t.ndjson")),
    "json list": lambda folder: write_json(folder / "t.json", as_list=True),
    "parquet": lambda folder: parquet(folder / "t.parquet"),
    "parquet.gz": lambda folder: gzipped(parquet(folder / "t.parquet")),
    "pandas": lambda folder: pandas_frame(),
    "pandas dates": lambda folder: dated_frame(),
    "polars": lambda folder: polars_frame(),
    "polars lazy": lambda folder: polars_frame().lazy(),
    "arrow": lambda folder: polars_frame().to_arrow(),
    "tuples": lambda folder: ROWS,
    "tuples with ratings": lambda folder: [(*row, 5.0) for row in ROWS],
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_gives_the_same_sequences(kind: str, tmp_path: Path) -> None:
    sequences = read(SOURCES[kind](tmp_path), tmp_path)
    assert decoded(sequences) == EXPECTED
    assert sequences.times is not None
    assert sequences.times[:3].tolist() == [1_600_000_100_000_000] * 2 + [1_600_000_300_000_000]
    assert [sequences.vocabulary.raw(token) for token in range(3)] == ["z", "ägypten", "本"]


def test_several_files_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("user,item\nu,1\nu,2\n")
    (tmp_path / "a.csv").write_text("item,user\n3,u\n")
    listed = read([tmp_path / "b.csv", tmp_path / "a.csv"], tmp_path)
    assert decoded(listed) == {"u": [1, 2, 3]}
    assert decoded(read(tmp_path / "*.csv", tmp_path)) == {"u": [3, 1, 2]}


def test_movielens_u_data_is_user_item_rating_time(tmp_path: Path) -> None:
    path = tmp_path / "u.data"
    path.write_text("2\t20\t5\t200\n2\t10\t1\t100\n1\t10\t3\t50\n10\t10\t3\t50\n")
    sequences = read(path, tmp_path)
    assert decoded(sequences) == {1: [10], 2: [10, 20], 10: [10]}
    assert sequences.user_ids == [1, 2, 10]  # as numbers, not as text


@pytest.mark.parametrize(
    ("values", "microseconds"),
    [
        (["1600000000", "1600000001"], 1_600_000_000_000_000),
        (["1600000000123", "1600000001000"], 1_600_000_000_123_000),
        (["1600000000123456", "1600000001000000"], 1_600_000_000_123_456),
        (["1600000000123456001", "1600000000123456002"], 1_600_000_000_123_456),
        (["1600000000.5", "1.600000001e9"], 1_600_000_000_500_000),
        (["-5", "1600000000"], -5_000_000),
        (["2020-09-13", "2020-09-14"], 1_599_955_200_000_000),
        (["2020-09-13T12:26:40Z", "2020-09-13T12:26:41Z"], 1_600_000_000_000_000),
        (["2020-09-13 14:26:40+02:00", "2020-09-13 12:26:41"], 1_600_000_000_000_000),
    ],
)
def test_units_and_dates_become_microseconds(values: list[str], microseconds: int, tmp_path: Path) -> None:
    first, second = values
    (tmp_path / "t.csv").write_text(f"user,item,ts\nu,late,{second}\nu,early,{first}\n")
    sequences = read(tmp_path / "t.csv", tmp_path)
    assert decoded(sequences) == {"u": ["early", "late"]}
    assert sequences.times is not None
    assert sequences.times[0] == microseconds


def test_unit_is_that_of_most_times_and_the_others_are_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    for most, odd in ((1_600_000_000, 1_600_000_000_000), (1_600_000_000_000, 1_600_000_000)):
        path.write_text(f"user,item,ts\nu,a,{most}\nu,b,{odd}\nu,c,{most}\nu,d,{most}\n")
        with pytest.raises(ValueError, match=f"row 3: .* is '{odd}', which is not .*as in most"):
            read(path, tmp_path)
        sequences = read(path, tmp_path, on_bad_rows="skip")
        assert sequences.times is not None
        assert sequences.times.tolist() == [1_600_000_000_000_000] * 3


@pytest.mark.parametrize("huge", ["9999999999999999999", "9" * 40, "9200000000000", "1e300"])
def test_huge_times_are_bad_rows_and_do_not_decide_the_unit(huge: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"user,item,ts\nu,a,{huge}\nu,b,6\nu,c,5\n")
    sequences = read(tmp_path / "t.csv", tmp_path, on_bad_rows="skip")
    assert decoded(sequences) == {"u": ["c", "b"]}
    assert sequences.times is not None
    assert sequences.times.tolist() == [5_000_000, 6_000_000]


NANOSECONDS = ["2020-09-13 12:26:40.123456789", "2020-09-13 12:26:40.123456788"]


@pytest.mark.parametrize(
    "frame",
    [
        pd.DataFrame({"ts": pd.to_datetime(NANOSECONDS).as_unit("ns")}),
        pd.DataFrame({"ts": pd.to_datetime(NANOSECONDS, utc=True).as_unit("ns")}),
        pl.DataFrame({"ts": pl.Series(NANOSECONDS).str.to_datetime(time_unit="ns")}),
        pl.DataFrame({"ts": pl.Series(NANOSECONDS).str.to_datetime(time_unit="ns", time_zone="UTC")}),
        pd.DataFrame({"ts": NANOSECONDS}),
    ],
    ids=["pandas", "pandas with zone", "polars", "polars with zone", "text"],
)
def test_nanoseconds_of_dates_decide_the_order(frame: Any, tmp_path: Path) -> None:
    ids = {"user": ["u", "u"], "item": ["late", "early"]}
    whole = frame.assign(**ids) if isinstance(frame, pd.DataFrame) else pl.DataFrame(ids).hstack(frame)
    sequences = read(whole, tmp_path)
    assert decoded(sequences) == {"u": ["early", "late"]}
    assert sequences.times is not None
    assert sequences.times.tolist() == [1_600_000_000_123_456] * 2


@pytest.mark.parametrize("lead", ["\n", "\n \n\n"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_blank_lines_before_the_header_are_no_rows(lead: str, end: str, tmp_path: Path) -> None:
    path, n = tmp_path / "t.csv", lead.count("\n")

    def write(last: str) -> None:
        path.write_bytes(f"{lead}user,item,ts\n1,7,1\n{last}\n".replace("\n", end).encode())

    write("1,8,2")
    assert decoded(read(path, tmp_path)) == {1: [7, 8]}
    write("1,8,x")
    with pytest.raises(ValueError, match=f"row {n + 3}: the time"):
        read(path, tmp_path)
    write("1,8")
    with pytest.raises(ValueError, match=f"line {n + 3}: '1,8' is malformed"):
        read(path, tmp_path)


def test_a_rating_without_a_name_is_not_taken_for_the_time(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("1,7,5\n1,8,3\n2,7,4\n")
    with pytest.raises(ValueError, match=r"column3 looks like a rating.*--rating column3.*--time"):
        read(path, tmp_path)
    assert decoded(read(path, tmp_path, rating="column3")) == {1: [7, 8], 2: [7]}
    assert decoded(read(path, tmp_path, time="column3")) == {1: [8, 7], 2: [7]}


def test_blanks_inside_dates_do_not_split_lines_with_commas(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("1,7,2020-09-13 12:26:40\n1,8,2020-09-13 12:26:39\n")
    assert decoded(read(path, tmp_path)) == {1: [8, 7]}


def test_one_column_cannot_have_two_roles(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("user,item,weight\n1,7,200\n1,8,100\n")
    for named in ({"user": "item"}, {"user": "user", "item": "user"}, {"time": "item"}):
        with pytest.raises(ValueError, match=r"column '(item|user)' cannot be both"):
            Interactions.read(path, Reading(**named))
    assert decoded(read(path, tmp_path, time="weight")) == {1: [8, 7]}  # and so not the rating


NESTED_IDS = [{"user": {"id": 1}, "item": 1}, {"user": 1, "item": [2]}]


@pytest.mark.parametrize("kind", ["json lines", "json list", "pandas", "polars"])
@pytest.mark.parametrize("bad", NESTED_IDS)
def test_objects_and_lists_are_no_ids(kind: str, bad: dict[str, Any], tmp_path: Path) -> None:
    nested = "user" if bad["user"] != 1 else "item"
    rows = [bad, bad]
    path = tmp_path / "t.json"
    path.write_text(json.dumps(rows) if kind == "json list" else "\n".join(map(json.dumps, rows)))
    frames = {"pandas": pd.DataFrame(rows), "polars": pl.DataFrame(rows)}
    with pytest.raises(ValueError, match=f"row 1: the {nested} .* or not a single value"):
        read(frames.get(kind, path), tmp_path)


def test_whole_floats_are_the_same_ids_as_integers(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"user": 1.0, "item": 2}\n{"user": 1, "item": "2.0"}\n')
    assert decoded(read(tmp_path / "t.jsonl", tmp_path)) == {1: ["2", "2.0"]}
    frame = pd.DataFrame({"user": [1.0, 1, "1"], "item": ["a", 2.0, 2]}, dtype=object)
    assert decoded(read(frame, tmp_path)) == {1: ["a", "2", "2"]}


def test_objects_of_several_types_are_read_one_by_one(tmp_path: Path) -> None:
    times = pd.Series([6, 5, pd.Timestamp("2020-01-01")], dtype=object)
    frame = pd.DataFrame({"user": 1, "item": [7, 8, 9], "ts": times})
    assert decoded(read(frame, tmp_path, on_bad_rows="skip")) == {1: [8, 7]}


def test_frames_that_are_no_tables_are_one_clear_error(tmp_path: Path) -> None:
    imaginary = pd.DataFrame({"user": [1j], "item": [1]})
    odd = pl.DataFrame({"user": [object()], "item": [1]}, schema={"user": pl.Object, "item": pl.Int64})
    for frame in (imaginary, odd, pl.scan_csv(tmp_path / "absent.csv")):
        with pytest.raises(ValueError, match=r"Frame cannot be read as a table") as caught:
            read(frame, tmp_path)
        assert "\n" not in str(caught.value)


def test_text_may_be_called_gz_and_a_tab_may_be_spelled(tmp_path: Path) -> None:
    plain = write_text(tmp_path / "t.csv.gz", "\t")
    for delimiter in (None, "tab", "\\t"):
        assert decoded(read(plain, tmp_path, delimiter=delimiter)) == EXPECTED


def test_frames_with_gaps_keep_integer_ids(tmp_path: Path) -> None:
    frame = pd.DataFrame({"user": [1.0, 1.0, None], "item": [5, 6, 7]})
    assert decoded(read(frame, tmp_path, on_bad_rows="skip")) == {1: [5, 6]}


def test_quotes_belong_to_titles_unless_whole_cells_are_quoted(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('user,item\n"a,b",1\n"a,b",2\n')
    (tmp_path / "items.tsv").write_text('item\ttitle\n1\t"Great" Cats\n2\tSpy "Dry"\n')
    sequences = read(tmp_path / "t.csv", tmp_path, items=tmp_path / "items.tsv")
    assert sequences.user_ids == ["a,b"]
    assert sequences.vocabulary.titles == ['"Great" Cats', 'Spy "Dry"']
    (tmp_path / "q.tsv").write_text('"user"\t"item"\n"u"\t"x\ty"\n"u"\t"z"\n')
    assert decoded(read(tmp_path / "q.tsv", tmp_path)) == {"u": ["x\ty", "z"]}


def test_item_table_gives_titles_and_keeps_other_columns(tmp_path: Path) -> None:
    events = [("u", 1), ("u", 2), ("u", 3)]
    (tmp_path / "movies.dat").write_bytes("1::Amélie::Comedy\n2::Heat::Crime\n".encode("latin-1"))
    vocabulary = read(events, tmp_path, items=tmp_path / "movies.dat").vocabulary
    assert vocabulary.titles == ["Amélie", "Heat", None]
    assert vocabulary.extra == {"column3": ["Comedy", "Crime", None]}

    # Called as in the interactions, `movie` wins over `item`; `Count` must not replace the count.
    frame = pl.DataFrame({"item": [9, 8], "movie": [2, 1], "name": ["b", "a"], "Count": [0, 7]})
    ratings = pd.DataFrame(events, columns=["user", "movie"])
    vocabulary = read(ratings, tmp_path, items=frame).vocabulary
    assert vocabulary.titles == ["a", "b", None]
    assert vocabulary.counts.tolist() == [1, 1, 1]
    assert vocabulary.extra == {"item_2": ["8", "9", None], "Count_2": ["7", "0", None]}
    (tmp_path / "items.csv").write_text("id,title\n1,One\n2\n,Nobody\n3,Three\n")
    said: list[str] = []
    interactions = Interactions.read(events, Reading(items=tmp_path / "items.csv"))
    prepared = prepare(interactions, out=tmp_path / "prepared", progress=said.append)
    assert prepared.vocabulary.titles == ["One", None, "Three"]
    assert any(line.startswith("left out 2 rows of ") for line in said)
    (tmp_path / "more.csv").write_text("id,title\n4,Four\n")
    with pytest.raises(ValueError, match="must be one file, and these are 2"):
        read(events, tmp_path, items=tmp_path / "*.csv")
    with pytest.raises(ValueError, match="none of the 3 items is in"):
        read(events, tmp_path, items=pl.DataFrame({"item": ["x"], "title": ["y"]}))


@pytest.mark.parametrize("role", ["user", "item", "time", "rating"])
def test_columns_are_found_in_any_spelling(role: Any) -> None:
    for name in NAMES[role]:
        for spelling in (name, name.upper(), f" {name[0]}_{name[1:]}-", f"{name}:token"):
            columns = ["something", spelling, "else"]
            assert require_column(role, columns, None, "t") == 1


def test_named_columns_overrule_found_ones(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("user,item,owner,thing\nu,1,o,x\nu,2,o,y\n")
    assert decoded(read(path, tmp_path, user="owner", item="Thing")) == {"o": ["x", "y"]}
    path.write_text("x,o,3,100\ny,o,3,50\n")
    assert decoded(read(path, tmp_path, user="column2", item="column1")) == {"o": ["y", "x"]}


ERRORS: dict[str, tuple[bytes, dict[str, Any], str]] = {
    "no user": (b"who,item\n1,2\n", {}, r"no user column.*'who', 'item'.*userid.*user=… \(--user"),
    "no item": (b"user,what\na,b\n", {}, r"no item column.*'user', 'what'.*itemid.*--item"),
    "wrong name": (b"user,item\n1,2\n", {"time": "when"}, r"no column 'when'.*'user', 'item'"),
    "empty": (b"", {}, "is empty"),
    "blank": (b"\n\n", {}, "is empty"),
    "header only": (b"user,item\n", {}, "header and no rows"),
    "wrong delimiter": (
        b"user\titem\n1\t2\n",
        {"delimiter": ","},
        r"only one column when split by ','.*looks separated by '\\t'",
    ),
    "no delimiter": (b"user\n1\n", {}, "only one column; its first line is 'user'"),
    "blank time": (
        b"user,item,ts\n1,2,3\n1,3,\n2,2,x\n",
        {},
        r"t\.csv, row 3: the time \(column 'ts'\) is '', which is blank; such rows in all: 2;.*"
        r"--on-bad-rows skip",
    ),
    "word as time": (b"user,item,ts\n1,2,3\n1,3,soon\n", {}, "row 3: .* is 'soon', which is not"),
    "after blank lines": (b"user,item,ts\n\n1,2,3\n\n1,3,x\n", {}, "row 5: the time"),
    "after a line break in an id": (b'user,item,ts\n"a\nb",2,3\n1,3,x\n', {}, "row 4: the time .* is 'x'"),
    "words without header": (b"ann,book\nann,pen\n", {}, r"no user column.*header=False"),
    "blank user": (b"user,item\n1,2\n,3\n1,4\n", {}, r"row 3: the user .* is '', which is blank"),
    "blank item": (b"user,item\n1,2\n1,\n", {}, r"row 3: the item .* such rows in all: 1;"),
    "short line": (
        b"user,item,ts\n1,2,3\n1,2\n4,5,6,7\n",
        {},
        r"line 3: '1,2' is malformed .*such rows in all: 2;.*on-bad-rows skip",
    ),
    "not utf-8": (b"user,item\n1,\xe9\n1,2\n", {}, r"line 2: .*not UTF-8.*encoding='latin-1'"),
    "unknown encoding": (b"user,item\n1,2\n", {"encoding": "latin-99"}, "'latin-99' is unknown"),
    "endless line": (b"user,item" * 20_000, {}, "first line of more than 128 KB"),
    "mixed line ends": (b"user,item\n1,2\r\n1,3\n1,4\n", {}, "lines end in different ways"),
    "json not utf-8": (
        b'{"user": "a", "item": 2}\n{"user": "\xe9", "item": 2}\n',
        {},
        "row 2: .*not JSON in UTF-8.*encoding='latin-1'",
    ),
    "json list not utf-8": (
        b'[{"user": "a", "item": 2}, {"user": "\xe9", "item": 2}]',
        {},
        "cannot be read: .*UTF-8.*encoding='latin-1'",
    ),
    "zip": (b"PK\x03\x04rest", {}, "zip archive: unpack it"),
    "truncated gzip": (gzip.compress(b"user,item\n" + b"1,2\n1,3\n" * 9999)[:-20], {}, "damaged or truncated gzip"),
    "not parquet": (b"PAR1 and nothing else", {}, "cannot be read"),
    "json without names": (b"[1, 2]", {}, "not objects"),
    "broken json line": (
        b'{"user": 1, "item": 2}\n{"user": 1\n{"user": 1, "item": 3}\n',
        {},
        "row 2: the user .* is ''",
    ),
    "bad option": (b"user,item\n1,2\n", {"on_bad_rows": "ignore"}, "choose 'error' or 'skip'"),
    "one action each": (b"user,item\n1,2\n2,3\n", {}, "one action only"),
    "one item": (b"user,item\n1,2\n1,2\n", {}, "too little is left of .*items 1, at least 2 needed"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input_is_one_clear_error_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    content, options, message = ERRORS[name]
    path = tmp_path / ("t.json" if name.startswith("json") else "t.csv")
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read(path, tmp_path, **options)
    assert str(caught.value).count("\n") == 0
    if name != "bad option" and "encoding" not in options:
        assert path.name in str(caught.value)
    assert list(tmp_path.iterdir()) == [path]


def test_truncated_parquet_and_missing_file(tmp_path: Path) -> None:
    path = parquet(tmp_path / "t.parquet")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"t\.parquet cannot be read"):
        Interactions.read(path)
    with pytest.raises(ValueError, match="does not exist"):
        Interactions.read(tmp_path / "absent.csv")
    with pytest.raises(ValueError, match=r"t\.parquet cannot be read"):
        Interactions.read(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match="is a directory"):
        Interactions.read(tmp_path)
    with pytest.raises(ValueError, match="no file matches"):
        Interactions.read(tmp_path / "*.xyz")
    with pytest.raises(ValueError, match="row 2 of the list"):
        read([("u", "i"), ("u", "i", 3)], tmp_path)
    with pytest.raises(ValueError, match="list of interactions is empty"):
        Interactions.read([])
    with pytest.raises(ValueError, match="from a int: pass a path"):
        Interactions.read(3)


def test_bad_rows_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(
            [
                ("user", "item", "ts", "rating"),
                ("u", "a", 1, 5),
                ("u", "", 2, 5),
                ("lost", "b", "soon", 5),
                ("u", "b"),
                ("u", "c", 3, 5),
            ]
        )
    sequences = read(path, tmp_path, on_bad_rows="skip")
    assert decoded(sequences) == {"u": ["a", "c"]}
    assert sequences.meta["dropped"] == [
        {"step": "malformed line", "rows": 1, "users": 0, "items": 0},
        {"step": "blank item", "rows": 1, "users": 0, "items": 0},
        {"step": "unreadable time", "rows": 1, "users": 1, "items": 1},
    ]
