"""The docs say what the committed results say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_results_page_is_what_its_files_say() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "results_page.py", "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
