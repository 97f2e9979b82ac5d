"""Downloads from a real HTTPS server, and hostile archives."""

import io
import random
import stat
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import pytest
from https_site import Site, authority, site, zip_of

from bert4rec.data import download as downloading
from bert4rec.data.download import download, extract

__all__ = ["authority", "site"]  # fixtures, used by name

BODY = random.Random(0).randbytes(1 << 20)  # does not compress


def load(site: Site, target: Path, path: str = "/file", max_bytes: int = 2 * len(BODY)) -> None:
    download(site.url(path), target, max_bytes=max_bytes, context=site.context)


def interrupt(site: Site, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break off after 300,000 bytes, as if the process were killed."""
    site.files["/file"], site.breaks_after = BODY, [300_000]
    with monkeypatch.context() as patch:
        patch.setattr(downloading, "ATTEMPTS", 1)
        with pytest.raises(ValueError, match=r"could not download .*300,000 of 1,048,576 bytes"):
            load(site, target)
    assert not target.exists()


def test_whole_file_arrives_with_progress_and_leaves_nothing_else(site: Site, tmp_path: Path) -> None:
    site.files["/file"] = BODY
    seen: list[tuple[int, int | None]] = []
    download(
        site.url("/file"),
        tmp_path / "new" / "file",
        max_bytes=len(BODY),
        progress=lambda done, total: seen.append((done, total)),
        context=site.context,
    )
    assert (tmp_path / "new" / "file").read_bytes() == BODY
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]
    assert seen[0] == (0, len(BODY))
    assert seen[-1] == (len(BODY), len(BODY))


def test_an_interrupted_download_is_resumed(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(site, tmp_path / "file", monkeypatch)
    load(site, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY
    assert site.requests == [("/file", None), ("/file", "bytes=300000-")]


def test_dropped_connections_are_resumed_within_one_call(site: Site, tmp_path: Path) -> None:
    site.files["/file"], site.breaks_after = BODY, [100_000, 200_000]
    load(site, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY
    assert [range_ for _, range_ in site.requests] == [None, "bytes=100000-", "bytes=300000-"]


def test_a_server_that_hangs_up_or_stays_silent_is_tried_again_then_reported(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.files["/file"] = BODY
    opened = urllib.request.OpenerDirector.open
    failures: list[Exception] = [TimeoutError("timed out"), ConnectionResetError("reset by peer")]

    def unreliable(opener: urllib.request.OpenerDirector, *request: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return opened(opener, *request, **options)

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", unreliable)
    load(site, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY
    failures[:] = [TimeoutError("timed out")] * downloading.ATTEMPTS
    with pytest.raises(ValueError, match=r"could not download .*: timed out"):
        load(site, tmp_path / "again")


@pytest.mark.parametrize("case", ["range ignored", "file changed", "weak etag", "no etag"])
def test_resuming_never_mixes_two_files(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    if case in ("weak etag", "no etag"):
        site.etag = 'W/"one"' if case == "weak etag" else None
    interrupt(site, tmp_path / "file", monkeypatch)
    changed = BODY[::-1]
    site.files["/file"] = changed
    if case == "range ignored":
        site.honours_range = False
    elif case == "file changed":
        site.etag = '"two"'
    load(site, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == changed


def test_part_longer_than_the_file_is_thrown_away(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(site, tmp_path / "file", monkeypatch)
    site.files["/file"] = BODY[:1000]
    load(site, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY[:1000]


@pytest.mark.parametrize("sends_length", [True, False])
def test_too_large_is_refused_with_or_without_a_stated_length(site: Site, tmp_path: Path, sends_length: bool) -> None:
    site.files["/file"], site.sends_length = BODY, sends_length
    with pytest.raises(ValueError, match=r"at most 500,000 are expected"):
        load(site, tmp_path / "file", max_bytes=500_000)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 1000
    assert not (tmp_path / "file").exists()


def test_plain_http_is_refused_before_anything_is_sent(site: Site, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only https"):
        download(site.url("/file").replace("https", "http"), tmp_path / "file", max_bytes=10)
    assert site.requests == []


def test_redirects_are_followed_to_https_only(site: Site, tmp_path: Path) -> None:
    site.files["/file"] = BODY
    site.redirects = {"/moved": "/file", "/down": site.url("/file").replace("https", "http")}
    load(site, tmp_path / "moved", "/moved")
    assert (tmp_path / "moved").read_bytes() == BODY
    with pytest.raises(ValueError, match="only https"):
        load(site, tmp_path / "down", "/down")
    assert not (tmp_path / "down").exists()


def test_unknown_certificate_is_refused(site: Site, tmp_path: Path) -> None:
    site.files["/file"] = BODY
    with pytest.raises(ValueError, match=r"(?i)certificate"):
        download(site.url("/file"), tmp_path / "file", max_bytes=len(BODY))


def link() -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo("set/link")
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    return entry


GOOD = {"set/table": b"1 2\n"}


@pytest.mark.parametrize(
    ("archive", "complaint"),
    [
        (zip_of(**GOOD, **{"../evil": b"x"}), "leads out"),
        (zip_of(**GOOD, **{"set/../../evil": b"x"}), "leads out"),
        (zip_of(**GOOD, **{"/etc/evil": b"x"}), "leads out"),
        (zip_of(**GOOD, **{"..\\evil": b"x"}), "leads out"),
        (zip_of(**GOOD, **{"C:/evil": b"x"}), "leads out"),
        (zip_of(**GOOD, link=(link(), b"/etc/passwd")), "is a link"),
        (zip_of(**{"set/table": bytes(20_000_000)}), "zip bomb"),
        (zip_of(**{"set/table": BODY + BODY[::-1] + BODY}), "would unpack to"),
        (zip_of(**{"set/other": b"x"}), "lacks set/table"),
        (zip_of(**GOOD)[:-30], "not a zip archive"),
        (b"<html>log in first</html>", "not a zip archive"),
    ],
    ids=lambda value: value if isinstance(value, str) else "archive",  # bytes hold the time of day
)
def test_hostile_or_broken_archives_are_refused(tmp_path: Path, archive: bytes, complaint: str) -> None:
    folder = tmp_path / "one" / "two"
    folder.mkdir(parents=True)
    (tmp_path / "set.zip").write_bytes(archive)
    with pytest.raises(ValueError, match=complaint):
        extract(tmp_path / "set.zip", folder, ["set/table"], max_bytes=2_000_000)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["set.zip"]


def test_flipped_bit_in_an_archive_is_noticed(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as zipped:
        zipped.writestr("set/table", b"1 2\n" * 100)
    damaged = bytearray(buffer.getvalue())
    damaged[100] ^= 1
    (tmp_path / "set.zip").write_bytes(damaged)
    with pytest.raises(ValueError, match="CRC"):
        extract(tmp_path / "set.zip", tmp_path, ["set/table"], max_bytes=1000)
    assert not (tmp_path / "table").exists()


def test_damaged_packing_is_noticed(tmp_path: Path) -> None:
    damaged = bytearray(zip_of(**{"set/table": BODY[:1000] * 3}))
    damaged[39:60] = b"\xff" * 21  # the beginning of the packed bytes
    (tmp_path / "set.zip").write_bytes(damaged)
    with pytest.raises(ValueError, match="not a zip archive that can be read"):
        extract(tmp_path / "set.zip", tmp_path, ["set/table"], max_bytes=5000)


def test_only_the_needed_members_leave_the_archive(tmp_path: Path) -> None:
    (tmp_path / "set.zip").write_bytes(zip_of(**GOOD, **{"set/large": BODY}))
    extract(tmp_path / "set.zip", tmp_path, ["set/table"], max_bytes=1000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set.zip", "table"]
    assert (tmp_path / "table").read_bytes() == b"1 2\n"
