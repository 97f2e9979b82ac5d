"""Public data sets: downloaded, checked, put there by hand, and read like any other table."""

import gzip
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from https_site import Site, authority, site, zip_of
from prepared import decoded

from bert4rec.data.interactions import Interactions
from bert4rec.data.prepare import prepare
from bert4rec.data.public import DATASETS, get
from bert4rec.data.sequences import Sequences
from bert4rec.environment import Environment

__all__ = ["authority", "site"]  # fixtures, used by name

# Small files in the publishers' formats; the titles and rows are invented.
FILM_1 = "1|Café Noir (1990)|01-Jan-1990||http://example.org/1|0|1" + "|0" * 16 + "|1\n"
FILM_2 = "2|Plain, and Simple (1991)|01-Jan-1991||http://example.org/2" + "|0" * 19 + "\n"
SMALL: dict[str, dict[str, bytes]] = {
    "ml-100k": {
        "ml-100k/u.data": b"7\t2\t3\t881250949\n7\t1\t5\t881250940\n8\t1\t1\t881250000\n",
        "ml-100k/u.item": (FILM_1 + FILM_2).encode("latin-1"),
        "ml-100k/README": b"terms",
    },
    "ml-1m": {
        "ml-1m/ratings.dat": b"7::2::3::978300760\n7::1::5::978300750\n8::1::1::978300000\n",
        "ml-1m/movies.dat": "1::Café Noir (1990)::Action|Western\n2::Plain, and Simple (1991)::\n".encode("latin-1"),
        "ml-1m/README": b"terms",
    },
    "ml-20m": {
        "ml-20m/ratings.csv": b"userId,movieId,rating,timestamp\n"
        b"7,2,3.5,1112486027\n7,1,5.0,1112486020\n8,1,0.5,1112486000\n",
        "ml-20m/movies.csv": "movieId,title,genres\n1,Café Noir (1990),Action|Western\n"
        '2,"Plain, and Simple (1991)",\n'.encode(),
        "ml-20m/README.txt": b"terms",
    },
}
LINES = b"7 1\n7 2\n8 1\n"


@pytest.fixture
def publish(site: Site, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], bytes]:
    """Offer a small data set of the given name on the local server instead of its publisher."""

    def offer(name: str) -> bytes:
        body = zip_of(**SMALL[name]) if name in SMALL else LINES
        dataset = DATASETS[name]
        path = "/" + dataset.file_name
        site.files[path] = body
        checksum = None if dataset.checksum is None else f"md5:{hashlib.md5(body).hexdigest()}"
        local = replace(dataset, url=site.url(path), size=len(body), checksum=checksum)
        monkeypatch.setitem(DATASETS, name, local)
        return body

    return offer


def read(name: str, folder: Path) -> Sequences:
    dataset = DATASETS[name]
    interactions = Interactions.read(folder / dataset.table, dataset.reading(folder))
    return prepare(interactions, out=folder.parent / "prepared")


@pytest.mark.parametrize("name", list(DATASETS))
def test_every_set_is_downloaded_once_and_read(
    site: Site, publish: Callable[[str], bytes], tmp_path: Path, name: str
) -> None:
    publish(name)
    folder = get(name, tmp_path, context=site.context)
    assert get(name, tmp_path, context=site.context) == folder == tmp_path / name
    assert len(site.requests) == 1

    sequences = read(name, folder)
    vocabulary = sequences.vocabulary
    assert decoded(sequences) == {7: [1, 2], 8: [1]}
    if name in SMALL:
        assert vocabulary.titles == ["Café Noir (1990)", "Plain, and Simple (1991)"]
        assert vocabulary.extra["genres"][0] == "Action|Western"
        assert sequences.times is not None


def test_pinned_checksum_is_enforced_and_the_wrong_file_removed(
    site: Site, publish: Callable[[str], bytes], tmp_path: Path
) -> None:
    body = publish("beauty")
    site.files["/beauty.txt"] = body.replace(b"7 2", b"7 3")
    with pytest.raises(ValueError, match=r"beauty\.txt has the md5 .* instead of"):
        get("beauty", tmp_path, context=site.context)
    assert list((tmp_path / "beauty").iterdir()) == []


def test_set_without_a_checksum_is_remembered_on_first_use(
    site: Site, publish: Callable[[str], bytes], tmp_path: Path
) -> None:
    body = publish("steam")
    folder = get("steam", tmp_path, context=site.context)
    noted = (folder / "steam.txt.sha256").read_text().strip()
    assert noted == hashlib.sha256(body).hexdigest()
    (folder / "steam.txt").unlink()
    site.files["/steam.txt"] = body.replace(b"7 2", b"7 3")
    with pytest.raises(ValueError, match="sha256"):
        get("steam", tmp_path, context=site.context)


@pytest.mark.parametrize(
    ("body", "complaint"), [(LINES + b"9 9\n", "bytes instead of"), (b"<html></html", "begins with")]
)
def test_set_without_a_checksum_has_its_size_and_format_checked(
    site: Site, publish: Callable[[str], bytes], tmp_path: Path, body: bytes, complaint: str
) -> None:
    assert len(publish("steam")) == len(b"<html></html") == 12
    site.files["/steam.txt"] = body
    with pytest.raises(ValueError, match=complaint):
        get("steam", tmp_path, context=site.context)
    assert list((tmp_path / "steam").iterdir()) == []


def test_without_internet_the_error_says_where_the_file_goes_and_it_is_picked_up(
    site: Site, publish: Callable[[str], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = publish("ml-100k")
    unreachable = replace(DATASETS["ml-100k"], url="https://localhost:9/ml-100k.zip")
    monkeypatch.setitem(DATASETS, "ml-100k", unreachable)
    place = tmp_path / "ml-100k" / "ml-100k.zip"
    with pytest.raises(ValueError, match="by other means") as caught:
        get("ml-100k", tmp_path, context=site.context)
    assert unreachable.url in str(caught.value)
    assert str(place) in str(caught.value)

    place.write_bytes(body[:-1] + b"?")
    with pytest.raises(ValueError, match="md5"):
        get("ml-100k", tmp_path, context=site.context)
    place.write_bytes(body)
    folder = get("ml-100k", tmp_path, context=site.context)
    assert (folder / "u.data").read_bytes() == SMALL["ml-100k"]["ml-100k/u.data"]
    assert place.exists()


def test_missing_page_is_reported_with_its_address(site: Site, publish: Callable[[str], bytes], tmp_path: Path) -> None:
    publish("beauty")
    site.files.clear()
    with pytest.raises(ValueError, match=r"(?s)beauty\.txt: Not Found.*by other means"):
        get("beauty", tmp_path, context=site.context)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'ml1m': did you mean ml-1m\? known are ml-100k, ml-1m"):
        get("ml1m")
    with pytest.raises(ValueError, match="demo comes with the package"):
        get("demo")


def test_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BERT4REC_DATA", str(tmp_path / "a"))
    monkeypatch.setenv("BERT4REC_CACHE", str(tmp_path / "b"))
    assert Environment().downloads == tmp_path / "a"
    assert Environment().prepared == tmp_path / "b" / "prepared"
    monkeypatch.delenv("BERT4REC_DATA")
    assert Environment().downloads == tmp_path / "b" / "data"
    monkeypatch.setenv("BERT4REC_CACHE", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert Environment().downloads == Path.home() / ".cache" / "bert4rec" / "data"


def test_every_entry_is_complete() -> None:
    for name, dataset in DATASETS.items():
        assert dataset.name == name
        assert dataset.url.startswith("https://")
        assert dataset.table in dataset.files
        assert dataset.item_table is None or dataset.item_table in dataset.files
        assert dataset.licence
        assert dataset.citation
        assert set(dataset.files) <= {dataset.file_name, *(Path(member).name for member in dataset.members)}


def test_real_ml_100k_is_read_with_titles(shared_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ml-100k"
    folder.mkdir()
    for name in ("u.data", "u.item"):
        (folder / name).symlink_to(shared_data / "ml-100k" / name)
    assert get("ml-100k", tmp_path) == folder
    sequences = read("ml-100k", folder)
    assert (sequences.n_users, sequences.n_items, sequences.n_interactions) == (943, 1682, 100_000)
    token = sequences.vocabulary.token(1)
    assert token is not None
    assert sequences.vocabulary.title(token) == "Toy Story (1995)"
    assert all(sequences.vocabulary.titles or [])


def test_real_movie_lists_parse_to_the_last_line(shared_data: Path) -> None:
    films = list(DATASETS["ml-1m"].films(shared_data / "ml-1m" / "movies.dat"))
    assert len(films) == 3883
    assert all(item.isdecimal() and title and genres for item, title, genres in films)
    assert films[0] == ("1", "Toy Story (1995)", "Animation|Children's|Comedy")
    assert len(list(DATASETS["ml-100k"].films(shared_data / "ml-100k" / "u.item"))) == 1682


def test_real_beauty_is_what_the_pinned_checksum_says(shared_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "beauty"
    folder.mkdir()
    packed = shared_data / "beauty" / "beauty.txt.gz"
    (folder / "beauty.txt").write_bytes(gzip.decompress(packed.read_bytes()))
    assert get("beauty", tmp_path) == folder
