"""The docs say what the committed results say."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "script", ["results_page.py", "quality/quality_page.py", "scale/scaling_page.py"]
)
def test_a_page_is_what_its_files_say(script: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
