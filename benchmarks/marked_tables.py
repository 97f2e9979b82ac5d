"""Pages whose tables are written by a script: what stands between `<!-- table NAME -->` and
`<!-- end -->` comes from committed JSON files, the sentences around it are typed."""

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

MARKED = re.compile(r"(<!-- table ([a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
Tables = Mapping[str, Callable[[], Iterable[str]]]  # name → lines


def write_or_check(page: Path, tables: Tables, description: str | None) -> None:
    """The main program of such a script; with --check it exits 1 when the page is out of date."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    before = page.read_text(encoding="utf-8")
    after = MARKED.sub(lambda found: fill(found, tables), before)
    if not arguments.check:
        page.write_text(after, encoding="utf-8")
    elif before != after:
        sys.exit(f"{page.name} is not what its JSON files say: run {Path(sys.argv[0]).name}")


def fill(found: re.Match[str], tables: Tables) -> str:
    return found[1] + "\n".join(tables[found[2]]()) + "\n" + found[3]


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    header = list(header)
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def wrap_prose(text: str, width: int = 120) -> str:
    """Paragraphs and list items with longer lines are wrapped; code, tables and headings stay."""
    lines: list[str] = []
    paragraph: list[str] = []

    def end_paragraph() -> None:
        if any(len(line) > width for line in paragraph):
            lead = re.match(r"\s*(?:(?:[-*]|\d+\.)\s+)?", paragraph[0])[0]
            words = " ".join([paragraph[0][len(lead) :], *(line.strip() for line in paragraph[1:])])
            options = {"break_long_words": False, "break_on_hyphens": False}
            indent = " " * len(lead)
            paragraph[:] = textwrap.wrap(words, width, initial_indent=lead, subsequent_indent=indent, **options)
        lines.extend(paragraph)
        paragraph.clear()

    is_code = False
    for line in text.split("\n"):
        is_fence = line.startswith("```")
        is_code ^= is_fence
        if is_code or is_fence or not line.strip() or line.startswith(("|", "#", "<!--", "![")):
            end_paragraph()
            lines.append(line)
            continue
        if re.match(r"\s*(?:[-*]|\d+\.)\s+", line):
            end_paragraph()
        paragraph.append(line)
    end_paragraph()
    return "\n".join(lines)
