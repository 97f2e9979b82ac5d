"""What several tests share: the real data sets and a real Redis, when this machine has them.

`make test` runs files in two processes at once; what that needs is here too.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

# Threads of torch that wait for each other sleep instead of spinning: whoever runs beside this
# process, another one of tests or a server, has use for the core. No result depends on it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported

# No test is about time, and whatever runs beside it may take the core for a while.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

# Files that take long come first, so that no process is left with one when the other is done.
LONG = (
    "test_end_to_end.py",
    "test_resume.py",
    "test_distributed.py",
    "test_serving_under_load.py",
    "test_batch_parts.py",
    "test_page.py",
    "test_prepare.py",
    "test_lab.py",
    "test_serving.py",
    "test_sharded_items.py",
    "test_process_groups.py",
    "test_memory.py",
    "test_contract.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        return LONG.index(item.path.name) if item.path.name in LONG else len(LONG)

    items.sort(key=place)  # keeps the order within a file


class ByFile(LoadFileScheduling):
    """A file's tests share its fixtures in one process; those with Ray share one runtime there."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "ray" if Path(file).name.startswith("test_ray_") else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    """For `pytest -n`, however the tests would be distributed otherwise."""
    return ByFile(config, log)


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
