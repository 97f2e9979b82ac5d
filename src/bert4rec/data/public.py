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
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from bert4rec.data.download import OnDownload, digest_of, download, extract
from bert4rec.data.table_file import Reading
from bert4rec.environment import Environment

GROUPLENS_LICENCE = "research use; no redistribution, no commercial use without permission"
GROUPLENS_CITATION = (
    "F. M. Harper and J. A. Konstan. The MovieLens Datasets: History and Context. "
    "ACM Transactions on Interactive Intelligent Systems 5(4), 2015."
)
# ml-100k marks genres by one column each, in the order of its file u.genre.
ML_100K_GENRES = (
    *("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime"),
    *("Documentary", "Drama", "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery"),
    *("Romance", "Sci-Fi", "Thriller", "War", "Western"),
)


@dataclass(frozen=True)
class PublicDataset:
    """One published data set. `size` is the length of the download in bytes."""

    name: str
    description: str
    n_interactions: int
    url: str
    size: int
    checksum: str | None  # "md5:…" or "sha256:…"; None: trusted on first use
    table: str  # the file of interactions
    first_line: str  # a regular expression for its first line
    citation: str
    delimiter: str = " "
    has_header: bool = False
    licence: str = "none stated: for research, do not pass it on"
    item_table: str | None = None  # the file of titles
    members: tuple[str, ...] = ()  # the files needed out of a zip; (): the download is the table

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


def _movielens(
    name: str,
    description: str,
    n_interactions: int,
    size: int,
    md5: str,
    files: tuple[str, str, str],
    first_line: str,
    delimiter: str,
    has_header: bool = False,
) -> PublicDataset:
    return PublicDataset(
        name,
        description,
        n_interactions,
        f"https://files.grouplens.org/datasets/movielens/{name}.zip",
        size,
        f"md5:{md5}",
        files[0],
        first_line,
        GROUPLENS_CITATION,
        delimiter,
        has_header,
        GROUPLENS_LICENCE,
        files[1],
        tuple(f"{name}/{file}" for file in files),
    )


AUTHORS_URL = "https://raw.githubusercontent.com/FeiSun/BERT4Rec/master/data"
DATASETS: dict[str, PublicDataset] = {
    dataset.name: dataset
    for dataset in (
        _movielens(
            "ml-100k",
            "MovieLens 100K: film ratings 1997-98, 943 users, 1,682 films, with titles",
            100_000,
            4_924_029,
            "0e33842e24a9c977be4e0107933c0723",
            ("u.data", "u.item", "README"),
            r"\d+\t\d+\t[1-5]\t\d+",
            "\t",
        ),
        _movielens(
            "ml-1m",
            "MovieLens 1M: film ratings 2000-03, 6,040 users, 3,706 films, with titles",
            1_000_209,
            5_917_549,
            "c4d9eecfca2ab87c1945afe126590906",
            ("ratings.dat", "movies.dat", "README"),
            r"\d+::\d+::[1-5]::\d+",
            "::",
        ),
        _movielens(
            "ml-20m",
            "MovieLens 20M: film ratings 1995-2015, 138,493 users, 26,744 films, with titles",
            20_000_263,
            198_702_078,
            "cd245b17a1ae2cc31bb14903e1204af3",
            ("ratings.csv", "movies.csv", "README.txt"),
            "userId,movieId,rating,timestamp",
            ",",
            has_header=True,
        ),
        PublicDataset(
            "beauty",
            "Amazon Beauty as in the BERT4Rec paper: 40,226 users, 54,542 items, order only",
            353_962,
            f"{AUTHORS_URL}/beauty.txt",
            3_912_093,
            "sha256:f480b7a7403852342ffd8f9809bb30697dd669be31813d0e204b698fec86ef49",
            "beauty.txt",
            r"\d+ \d+",
            "J. McAuley et al. Image-Based Recommendations on Styles and Substitutes. SIGIR 2015; "
            "prepared by F. Sun et al. BERT4Rec. CIKM 2019.",
        ),
        PublicDataset(
            "steam",
            "Steam reviews as in the BERT4Rec paper: 281,428 users, 13,044 items, order only",
            3_488_885,
            f"{AUTHORS_URL}/steam.txt",
            38_226_650,
            None,
            "steam.txt",
            r"\d+ \d+",
            "W.-C. Kang and J. McAuley. Self-Attentive Sequential Recommendation. ICDM 2018; "
            "prepared by F. Sun et al. BERT4Rec. CIKM 2019.",
        ),
    )
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
        _write_item_table(dataset.name, folder / dataset.item_table, folder / "items.csv")
    return folder


def _fetch(dataset: PublicDataset, folder: Path, progress: OnDownload | None, context: ssl.SSLContext | None) -> None:
    path = folder / dataset.file_name
    is_downloaded = not path.is_file()
    if is_downloaded:
        try:
            # Not under the final name: an unchecked file would count as one put there by hand.
            fresh = folder / (dataset.file_name + ".unchecked")
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
    else:
        _check_contents(dataset, path, path)
    if dataset.members:
        # Ratings compress to about a quarter: ten times the size is enough, and still a limit.
        extract(path, folder, dataset.members, max_bytes=10 * dataset.size)


def _check_contents(dataset: PublicDataset, path: Path, final_path: Path) -> None:
    """Compare with the pinned checksum or, if there is none, with that of the first download."""
    remedy = f"delete {final_path} if it is there, and repeat the command"
    remembered = final_path.with_name(final_path.name + ".sha256")
    expected = dataset.checksum
    if expected is None and remembered.is_file():
        expected = f"sha256:{remembered.read_text(encoding='ascii').strip()}"
    if expected is None:
        n_bytes = path.stat().st_size
        if n_bytes != dataset.size:
            raise ValueError(f"{dataset.file_name} has {n_bytes:,} bytes instead of {dataset.size:,}: {remedy}")
        _check_format(dataset, path)
        remembered.write_text(digest_of(path, "sha256") + "\n", encoding="ascii")
        return
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


def _write_item_table(name: str, source: Path, target: Path) -> None:
    """Write a publisher's film list as `items.csv`: item, title, genres, in UTF-8."""
    unfinished = target.with_name(target.name + ".part")
    with unfinished.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["item", "title", "genres"])
        writer.writerows(FILM_LISTS[name](source))
    unfinished.replace(target)


def _ml_100k_films(path: Path) -> list[tuple[str, str, str]]:
    films = []
    for line in path.read_text(encoding="latin-1").splitlines():
        item, title, _released, _video, _address, *flags = line.split("|")
        marked = [g for g, flag in zip(ML_100K_GENRES, flags, strict=True) if flag == "1"]
        films.append((item, title, "|".join(marked)))
    return films


def _ml_1m_films(path: Path) -> list[tuple[str, str, str]]:
    films = []
    for line in path.read_text(encoding="latin-1").splitlines():
        item, rest = line.split("::", 1)
        title, genres = rest.rsplit("::", 1)
        films.append((item, title, genres))
    return films


def _ml_20m_films(path: Path) -> list[tuple[str, str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return [(row["movieId"], row["title"], row["genres"]) for row in csv.DictReader(file)]


FILM_LISTS = {"ml-100k": _ml_100k_films, "ml-1m": _ml_1m_films, "ml-20m": _ml_20m_films}
