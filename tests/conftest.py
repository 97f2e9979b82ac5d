"""What several tests share: the real data sets and a real Redis, when this machine has them."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets; tests that need it are left out, and say so, without it."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("BERT4REC_SHARED_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"real data sets not found at {folder}; set BERT4REC_SHARED_DATA to run this")
    return folder


@pytest.fixture(scope="session")
def redis_socket() -> Iterator[Path]:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed (Debian and Ubuntu: apt install redis-server)")
    with tempfile.TemporaryDirectory() as folder:  # short: a socket's path has at most 107 bytes
        socket = Path(folder) / "s"
        arguments = ["--port", "0", "--unixsocket", str(socket), "--dir", folder, "--save", ""]
        server = subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL)
        try:
            give_up = time.monotonic() + 10
            while not socket.exists():
                assert time.monotonic() < give_up
                assert server.poll() is None
                time.sleep(0.01)
            yield socket
        finally:
            server.terminate()
            server.wait()
