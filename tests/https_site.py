"""A real HTTPS server on this machine that misbehaves on demand, and archives to offer on it."""

import io
import ssl
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import trustme


@dataclass
class Site:
    """What the server holds and how it misbehaves."""

    files: dict[str, bytes] = field(default_factory=dict)
    etag: str | None = '"one"'
    honours_range: bool = True
    sends_length: bool = True
    breaks_after: list[int] = field(default_factory=list)  # bytes, of the next responses
    redirects: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str | None]] = field(default_factory=list)  # path, Range
    base: str = ""
    context: ssl.SSLContext = field(default_factory=ssl.create_default_context)

    def url(self, path: str) -> str:
        return self.base + path


def handler_for(site: Site) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            site.requests.append((self.path, self.headers.get("Range")))
            if self.path in site.redirects:
                self.send_response(302)
                self.send_header("Location", site.redirects[self.path])
                self.end_headers()
                return
            if self.path not in site.files:
                self.send_error(404)
                return
            body, start = site.files[self.path], 0
            wanted = self.headers.get("Range")
            if wanted and site.honours_range and self.headers.get("If-Range") == site.etag:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                if start >= len(body):
                    self.send_error(416)
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            else:
                self.send_response(200)
            if site.etag:
                self.send_header("ETag", site.etag)
            if site.sends_length:
                self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            stop = start + site.breaks_after.pop(0) if site.breaks_after else len(body)
            self.wfile.write(body[start:stop])

    return Handler


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def site(authority: trustme.CA, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("NO_PROXY", "localhost")
    site = Site()
    server = ThreadingHTTPServer(("localhost", 0), handler_for(site))
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server_context)
    server.socket = server_context.wrap_socket(server.socket, server_side=True)
    authority.configure_trust(site.context)
    site.base = f"https://localhost:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield site
    server.shutdown()
    server.server_close()
    thread.join()


def zip_of(**members: bytes | tuple[zipfile.ZipInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, content in members.items():
            if isinstance(content, tuple):
                zipped.writestr(*content)
            else:
                zipped.writestr(name, content)
    return buffer.getvalue()
