"""A resumable HTTPS download and a careful unzip, both with limits."""

import hashlib
import http.client
import json
import os
import ssl
import stat
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path, PurePosixPath
from typing import IO

OnDownload = Callable[[int, int | None], None]  # bytes done, bytes in all (None: unknown)

CHUNK = 1 << 18
TIMEOUT = 30.0  # seconds without a single byte
ATTEMPTS = 3  # a dropped connection is resumed at once
MAX_RATIO = 100  # text compresses to about a tenth, a zip bomb to a thousandth


def download(
    url: str, target: Path, *, max_bytes: int, progress: OnDownload | None = None, context: ssl.SSLContext | None = None
) -> None:
    """Download `url` to `target`, or raise ValueError and leave no `target`.

    What has arrived is kept in `target.part`. The next call requests only the rest, if the server
    still has the same file (If-Range); otherwise it starts over. The caller checks the contents.
    """
    _require_https(url)
    target.parent.mkdir(parents=True, exist_ok=True)
    opener = _https_only_opener(context)
    transfer = _Transfer(url, target.with_name(target.name + ".part"), max_bytes, progress, opener)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            transfer.run()
            break
        except (urllib.error.URLError, http.client.HTTPException, _ConnectionLost) as error:
            if attempt == ATTEMPTS or isinstance(error, urllib.error.HTTPError):
                reason = getattr(error, "reason", None) or error or type(error).__name__
                raise ValueError(f"could not download {url}: {reason}") from error
    transfer.part.replace(target)
    transfer.note.unlink(missing_ok=True)


class _ConnectionLost(Exception):
    """The transfer ended before all bytes had arrived."""


@dataclass(frozen=True)
class _Transfer:
    """Brings `part` to its full length; a note beside it says which version of the file it is."""

    url: str
    part: Path
    max_bytes: int
    progress: OnDownload | None
    opener: urllib.request.OpenerDirector

    @property
    def note(self) -> Path:
        return self.part.with_name(self.part.name + ".json")

    def run(self) -> None:
        """Send one request for what is missing, and append the response."""
        request = urllib.request.Request(self.url, headers={"User-Agent": "bert4rec"})
        n_held, validator = self._held()
        if n_held:
            request.add_header("Range", f"bytes={n_held}-")
            request.add_header("If-Range", validator)
        try:
            response = self.opener.open(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE or not n_held:
                raise
            # Our part is as long as the file, or longer: it is not a beginning of it.
            self.part.unlink()
            return self.run()
        except urllib.error.URLError:
            raise
        except OSError as error:  # urllib wraps errors of the request, not those of the wait
            raise _ConnectionLost(str(error) or type(error).__name__) from error
        with response:
            resumes = response.status == http.client.PARTIAL_CONTENT
            sent = response.headers.get("Content-Range", "")
            if resumes and not sent.startswith(f"bytes {n_held}-"):
                self.part.unlink()
                raise _ConnectionLost("the server sent another range than the requested one")
            n_done = n_held if resumes else 0
            length = response.headers.get("Content-Length")
            n_total = n_done + int(length) if length is not None and length.isdecimal() else None
            if n_total is not None and n_total > self.max_bytes:
                self.part.unlink(missing_ok=True)
                raise self._too_large(n_total)
            if not resumes:
                self._write_note(response.headers)
            with self.part.open("ab" if resumes else "wb") as file:
                self._copy(response, file, n_done, n_total)
                file.flush()
                os.fsync(file.fileno())

    def _copy(self, response: IO[bytes], file: IO[bytes], n_done: int, n_total: int | None) -> None:
        while True:
            if self.progress is not None:
                self.progress(n_done, n_total)
            try:
                chunk = response.read(CHUNK)
            except OSError as error:  # of the network; errors of the disk are not caught
                raise _ConnectionLost(str(error)) from error
            if not chunk:
                break
            n_done += len(chunk)
            if n_done > self.max_bytes:  # the server gave no length, or a wrong one
                file.truncate(0)
                raise self._too_large(n_done)
            file.write(chunk)
        if n_total is not None and n_done < n_total:
            raise _ConnectionLost(f"the connection ended after {n_done:,} of {n_total:,} bytes")

    def _too_large(self, n_bytes: int) -> ValueError:
        return ValueError(f"{self.url} sends {n_bytes:,} bytes or more; at most {self.max_bytes:,} are expected")

    def _write_note(self, headers: Message) -> None:
        etag = headers.get("ETag", "")
        strong = etag if etag.startswith('"') else None  # If-Range may not have a weak one
        note = {"url": self.url, "validator": strong or headers.get("Last-Modified")}
        self.note.write_text(json.dumps(note), encoding="utf-8")

    def _held(self) -> tuple[int, str]:
        """How many bytes are in `part`, and of which version; 0 if that is unknown."""
        try:
            known = json.loads(self.note.read_text(encoding="utf-8"))
            if known["url"] == self.url and known["validator"]:
                return self.part.stat().st_size, str(known["validator"])
        except (OSError, ValueError, KeyError, TypeError):  # no note, or a broken one: start over
            pass
        return 0, ""


def _require_https(url: str) -> None:
    if not url.lower().startswith("https://"):
        raise ValueError(f"refusing to download {url}: only https addresses are allowed")


class _HttpsRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        _require_https(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _https_only_opener(context: ssl.SSLContext | None) -> urllib.request.OpenerDirector:
    """No handler for http, ftp or file: such an address cannot be opened even by mistake."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPSHandler(context=context or ssl.create_default_context()),
        _HttpsRedirects(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
    ):
        opener.add_handler(handler)
    return opener


def digest_of(path: Path, algorithm: str) -> str:
    """Hex digest of a file, read in chunks."""
    with path.open("rb") as file:
        # MD5 detects damage only, but some publishers give nothing better.
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def extract(archive: Path, folder: Path, members: Sequence[str], *, max_bytes: int) -> None:
    """Unzip `members`, and nothing else, into `folder` under their last names.

    A hostile archive is refused as a whole: paths that lead out of the folder, links, more than
    `max_bytes` unpacked, or a compression ratio that only a zip bomb has.
    """
    try:
        with zipfile.ZipFile(archive) as zipped:
            for entry in zipped.infolist():
                _check_entry(archive, entry)
            entries = {entry.filename: entry for entry in zipped.infolist()}
            missing = [member for member in members if member not in entries]
            if missing:
                raise ValueError(f"{archive} lacks {', '.join(missing)}: not the expected archive")
            n_bytes = sum(entries[member].file_size for member in members)
            if n_bytes > max_bytes:
                raise ValueError(f"{archive} would unpack to {n_bytes:,} bytes, at most {max_bytes:,} expected")
            for member in members:
                _extract_one(zipped, entries[member], folder / PurePosixPath(member).name)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{archive} is not a zip archive that can be read: {error}") from error


def _check_entry(archive: Path, entry: zipfile.ZipInfo) -> None:
    # ZipFile turns backslashes in the archive into slashes on Windows only.
    path = PurePosixPath(entry.filename.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in entry.filename:
        raise ValueError(f"{archive} is refused: {entry.filename!r} leads out of its folder")
    if stat.S_ISLNK(entry.external_attr >> 16):
        raise ValueError(f"{archive} is refused: {entry.filename!r} is a link")
    if entry.file_size > MAX_RATIO * max(entry.compress_size, 1024):
        raise ValueError(
            f"{archive} is refused: {entry.filename!r} would unpack from "
            f"{entry.compress_size:,} to {entry.file_size:,} bytes, as a zip bomb does"
        )


def _extract_one(zipped: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path) -> None:
    unfinished = target.with_name(target.name + ".part")
    with zipped.open(entry) as source, unfinished.open("wb") as file:
        while chunk := source.read(CHUNK):  # ends at the declared size and checks the CRC
            file.write(chunk)
    unfinished.replace(target)
