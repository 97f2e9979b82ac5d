"""The docs say what the committed results say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


PAGES = ["results_page.py", "quality/quality_page.py", "scale/scaling_page.py", "settings_page.py"]


@pytest.mark.parametrize("script", PAGES)
def test_a_page_is_what_its_files_say(script: str) -> None:
    done = subprocess.run([sys.executable, ROOT / "benchmarks" / script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_links_lead_somewhere_and_lines_are_short() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/[!r]*/*.md")]:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)\s#]+)[^)]*\)", text):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page}: {link}"
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        for line in prose.splitlines():
            is_free = line.startswith("|") or "](" in line  # a table, or a link that cannot be cut
            assert is_free or len(line) <= 120, f"{page}: {line}"
