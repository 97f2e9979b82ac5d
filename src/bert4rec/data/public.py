"""Public data sets by name: where they are published, how to verify them, how to read them.

Nothing of them comes with this package. Each is downloaded from its publisher to the user's
machine, under the publisher's terms, and checked: GroupLens publishes the MD5 of its archives. The
authors of `beauty` and `steam` publish none. The SHA-256 of `beauty.txt` was taken from a copy of
it. For `steam`, size and format are checked, and the SHA-256 of the first download is saved beside
the file and checked from then on.

`beauty` and `steam` are the BERT4Rec authors' own `user item` files, so that results compare with
the paper's without guessing how the raw Amazon and Steam reviews were filtered.
"""

import csv
import difflib
import re
import ssl
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path, PurePosixPath

from bert4rec.data.download import OnDownload, digest_of, download, extract
from bert4rec.data.table_file import Reading, split_rows
from bert4rec.durable import new_file
from bert4rec.environment import Environment


@dataclass(frozen=True)
class PublicDataset:
    """One published data set. `size` is the length of the download in bytes."""

    name: str
    description: str
    n_interactions: int
    url: str
    size: int
    table: str  # the file of interactions
    first_line: str  # a regular expression for its first line
    citation: str
    checksum: str | None = None  # "md5:…" or "sha256:…"; None: trusted on first use
    delimiter: str = " "
    has_header: bool = False
    licence: str = "none stated: for research, do not pass it on"
    item_table: str | None = None  # the file of titles, its genres in the last column
    item_delimiter: str | None = None  # None: as in `table`
    item_encoding: str = "utf-8"
    genres: Sequence[str] = ()  # if each genre is a column of 0 or 1
    members: Sequence[str] = ()  # the files needed out of a zip; (): the download is the table

    @property
    def file_name(self) -> str:
        return PurePosixPath(self.url).name

    @property
    def files(self) -> tuple[str, ...]:
        """What has to be in the folder before the set can be read."""
        return (self.table,) if self.item_table is None else (self.table, self.item_table)

    def reading(self, folder: Path, reading: Reading = Reading()) -> Reading:  # noqa: B008 (frozen)
        """How to read the table that `get` put into `folder`."""
        items = reading.items if self.item_table is None else folder / "items.csv"
        return replace(reading, delimiter=self.delimiter, header=self.has_header, items=items)

    def films(self, path: Path) -> Iterator[tuple[str, str, str]]:
        """The item, title and genres of each film in the publisher's list."""
        rows = split_rows(path.read_text(encoding=self.item_encoding), self.item_delimiter or self.delimiter)
        for item, title, *others in rows[1:] if self.has_header else rows:
            genres = others[-1]
            if self.genres:
                flags = zip(self.genres, others[-len(self.genres) :], strict=True)
                genres = "|".join(genre for genre, flag in flags if flag == "1")
            yield item, title, genres


DATASETS = {
    name: PublicDataset(name, **facts)
    for name, facts in tomllib.loads(
        (resources.files("bert4rec.data") / "public.toml").read_text(encoding="utf-8")
    ).items()
}


def dataset_named(name: str) -> PublicDataset:
    if name in DATASETS:
        return DATASETS[name]
    if name == "demo":
        raise ValueError("demo comes with the package: use it by its name, nothing is downloaded")
    near = difflib.get_close_matches(name.lower(), DATASETS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(f"no data set is named {name!r}: {hint}known are {', '.join(DATASETS)}")


def get(
    name: str, cache: Path | None = None, progress: OnDownload | None = None, context: ssl.SSLContext | None = None
) -> Path:
    """The folder with the files of a data set, downloaded first if they are not there.

    A file that was put there by hand, the archive or its contents, counts as downloaded and is
    checked in the same way.
    """
    dataset = dataset_named(name)
    folder = (cache or Environment().downloads) / name
    if not dataset.members or not all((folder / file).is_file() for file in dataset.files):
        _fetch(dataset, folder, progress, context)
    _check_format(dataset, folder / dataset.table)
    if dataset.item_table is not None and not (folder / "items.csv").is_file():
        films = dataset.films(folder / dataset.item_table)
        with new_file(folder / "items.csv") as path, path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("item", "title", "genres"), *films])
    return folder


def _fetch(dataset: PublicDataset, folder: Path, progress: OnDownload | None, context: ssl.SSLContext | None) -> None:
    path = folder / dataset.file_name
    if path.is_file():
        _check_contents(dataset, path, path)
    else:
        # Not under the final name: an unchecked file would count as one put there by hand.
        fresh = folder / (dataset.file_name + ".unchecked")
        try:
            download(dataset.url, fresh, max_bytes=2 * dataset.size, progress=progress, context=context)
        except ValueError as error:
            raise ValueError(
                f"{error}\nWithout this download: fetch {dataset.url} by other means, "
                f"put the file at {path} and repeat the command."
            ) from error
        try:
            _check_contents(dataset, fresh, path)
        except ValueError:
            fresh.unlink()
            raise
        fresh.replace(path)
    if dataset.members:
        # Ratings compress to about a quarter: ten times the size is enough, and still a limit.
        extract(path, folder, dataset.members, max_bytes=10 * dataset.size)


def _check_contents(dataset: PublicDataset, path: Path, final_path: Path) -> None:
    """Compare with the pinned checksum or, if there is none, with that of the first download."""
    remedy = f"delete {final_path} if it is there, and repeat the command"
    remembered = final_path.with_name(final_path.name + ".sha256")
    if dataset.checksum is None and not remembered.is_file():
        n_bytes = path.stat().st_size
        if n_bytes != dataset.size:
            raise ValueError(f"{dataset.file_name} has {n_bytes:,} bytes instead of {dataset.size:,}: {remedy}")
        _check_format(dataset, path)
        remembered.write_text(digest_of(path, "sha256") + "\n", encoding="ascii")
    expected = dataset.checksum or f"sha256:{remembered.read_text(encoding='ascii').strip()}"
    algorithm, digest = expected.split(":")
    found = digest_of(path, algorithm)
    if found != digest:
        raise ValueError(f"{dataset.file_name} has the {algorithm} {found} instead of {digest}: {remedy}")


def _check_format(dataset: PublicDataset, table: Path) -> None:
    with table.open(encoding="latin-1") as file:
        line = file.readline(200).rstrip("\r\n")
    if not re.fullmatch(dataset.first_line, line):
        raise ValueError(
            f"{table} begins with {line!r}, which is not the format of {dataset.name}: "
            "delete the file and repeat the command"
        )
