"""What several tests share: the real data sets, when this machine has them."""

import os
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
