"""A resumable HTTPS download and a careful unzip, both with limits."""

import errno
import hashlib
import http.client
import os
import shutil
import ssl
import stat
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from bert4rec.durable import new_file

OnDownload = Callable[[int, int | None], None]  # bytes done, bytes in all (None: unknown)

CHUNK = 1 << 18
TIMEOUT = 30.0  # seconds without a single byte
OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO}
ATTEMPTS = 3  # a dropped connection is resumed at once
MAX_RATIO = 100  # text compresses to about a tenth, a zip bomb to a thousandth


def download(
    url: str, target: Path, *, max_bytes: int, progress: OnDownload | None = None, context: ssl.SSLContext | None = None
) -> None:
    """Download `url` to `target`, or raise ValueError and leave no `target`.

    What has arrived is kept in `target.part`. The next call requests only the rest, if the server
    still has the same file (If-Range); otherwise it starts over. The caller checks the contents.
    """
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _HttpsOnly())
    target.parent.mkdir(parents=True, exist_ok=True)
    part = _Part(target.with_name(target.name + ".part"), url)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            part.complete(opener, max_bytes, progress)
            break
        except (OSError, http.client.HTTPException) as error:
            if getattr(error, "errno", None) in OF_THE_DISK:
                raise ValueError(f"{part.path} cannot be written: {error.strerror}") from None  # type: ignore[union-attr]
            code = getattr(error, "code", None)  # of a response that is an error
            is_too_long = code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE
            if is_too_long:  # what we hold is not the beginning of this file
                part.path.unlink(missing_ok=True)
            if attempt == ATTEMPTS or (code is not None and not is_too_long):
                reason = getattr(error, "reason", None) or str(error) or type(error).__name__
                raise ValueError(f"could not download {url}: {reason}") from error
    part.path.replace(target)
    part.version.unlink(missing_ok=True)


class _HttpsOnly(urllib.request.BaseHandler):
    """Is asked first about every address, that of a redirect too."""

    def default_open(self, request: urllib.request.Request) -> None:
        if request.type != "https":
            raise ValueError(f"refusing to download {request.full_url}: only https addresses are allowed")


@dataclass(frozen=True)
class _Part:
    """The beginning of a file; a note beside it says of which version."""

    path: Path
    url: str

    @property
    def version(self) -> Path:
        return self.path.with_name(self.path.name + ".version")

    def complete(self, opener: urllib.request.OpenerDirector, max_bytes: int, progress: OnDownload | None) -> None:
        """Send one request for what is missing, and append the response."""
        n_held, version = self._held()
        headers = {"User-Agent": "bert4rec"}
        if n_held:
            headers |= {"Range": f"bytes={n_held}-", "If-Range": version}
        with opener.open(urllib.request.Request(self.url, headers=headers), timeout=TIMEOUT) as response:
            resumes = response.status == http.client.PARTIAL_CONTENT
            if resumes and not response.headers.get("Content-Range", "").startswith(f"bytes {n_held}-"):
                self.path.unlink()
                raise ConnectionError("the server sent another range than the requested one")
            n_done = n_held if resumes else 0
            length = response.headers.get("Content-Length", "")
            n_total = n_done + int(length) if length.isdecimal() else None
            with self.path.open("ab" if resumes else "wb") as file:
                if not resumes:
                    etag = response.headers.get("ETag", "")
                    strong = etag if etag.startswith('"') else None  # If-Range may not have a weak one
                    validator = strong or response.headers.get("Last-Modified", "")
                    self.version.write_text(f"{self.url}\n{validator}", encoding="utf-8")
                while True:
                    n_bytes = max(n_done, n_total or 0)  # the server may give no length, or a wrong one
                    if n_bytes > max_bytes:
                        file.truncate(0)
                        raise ValueError(
                            f"{self.url} sends {n_bytes:,} bytes or more; at most {max_bytes:,} are expected"
                        )
                    if progress is not None:
                        progress(n_done, n_total)
                    chunk = response.read(CHUNK)
                    if not chunk:
                        break
                    file.write(chunk)
                    n_done += len(chunk)
                if n_total is not None and n_done < n_total:
                    raise ConnectionError(f"the connection ended after {n_done:,} of {n_total:,} bytes")
                file.flush()
                os.fsync(file.fileno())

    def _held(self) -> tuple[int, str]:
        """How many bytes are here, and of which version; 0 if that is unknown."""
        if not (self.path.is_file() and self.version.is_file()):
            return 0, ""
        url, _, validator = self.version.read_text(encoding="utf-8", errors="replace").partition("\n")
        return (self.path.stat().st_size, validator) if url == self.url and validator else (0, "")


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
                with (
                    zipped.open(entries[member]) as source,
                    new_file(folder / PurePosixPath(member).name) as path,
                    path.open("wb") as file,
                ):
                    shutil.copyfileobj(source, file)  # ends at the declared size and checks the CRC
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
