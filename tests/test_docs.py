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


def pages() -> list[Path]:
    return [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/[!r]*/*.md"),
        *ROOT.glob("docs/reference/*.md"),
    ]


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_lead_somewhere_and_lines_are_short(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link, anchor in re.findall(r"\]\(([^)\s#]*)#?([^)\s]*)\)", text):
        if "://" in link:
            continue
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for line in prose.splitlines():
        assert len(line) <= 120, line
