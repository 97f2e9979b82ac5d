"""A table of text for the terminal, for Markdown or for LaTeX."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table

TextFormat = Literal["markdown", "latex"]
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "–": "--",
    "…": r"\ldots{}",
    "≤": r"$\leq$",
    "±": r"$\pm$",
} | {each: "\\" + each for each in "&%$#_{}"}


@dataclass(frozen=True)
class TextTable:
    """Plain text, escaped when it is written; a cell may have a second line, with a detail.

    The first `n_names` columns are aligned to the left, the others to the right.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    n_names: int = 1

    def to_text(self, text_format: TextFormat) -> str:
        return self.to_markdown() if text_format == "markdown" else self.to_latex()

    def to_markdown(self) -> str:
        marks = ["---"] * self.n_names + ["---:"] * (len(self.columns) - self.n_names)
        lines = [[escape_markdown(in_brackets(c)) for c in row] for row in (self.columns, *self.rows)]
        return "".join(f"| {' | '.join(line)} |\n" for line in (lines[0], marks, *lines[1:]))

    def to_latex(self) -> str:
        """A `tabular` for the package booktabs."""
        alignment = "l" * self.n_names + "r" * (len(self.columns) - self.n_names)
        heading, *rows = (
            " & ".join(escape_latex(in_brackets(cell)) for cell in row) + r" \\" for row in (self.columns, *self.rows)
        )
        lines = [rf"\begin{{tabular}}{{{alignment}}}", r"\toprule", heading, r"\midrule"]
        return "\n".join([*lines, *rows, r"\bottomrule", r"\end{tabular}"]) + "\n"

    def to_terminal(self, title: str, notes: Sequence[str] = ()) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title=Text(one_line(title)),
            title_justify="left",
            caption=Text("\n".join(notes)) if notes else None,
            caption_justify="left",
        )
        for place, column in enumerate(self.columns):
            is_name = place < self.n_names
            justify: Literal["left", "right"] = "left" if is_name else "right"
            table.add_column(column, justify=justify, overflow="fold")
        for row in self.rows:
            lines = ([one_line(line) for line in cell.split("\n")] for cell in row)
            table.add_row(*(Text(first).append("".join(f"\n{x}" for x in rest), "dim") for first, *rest in lines))
        return table


def in_brackets(cell: str) -> str:
    """`.1796 (.1718–.1873)` of a cell with a detail."""
    text, _, detail = cell.partition("\n")
    return f"{text} ({detail})" if detail else text


def one_line(text: str) -> str:
    """`text` without control characters, so that a title cannot break a terminal or a table."""
    return "".join(each if each.isprintable() else " " for each in text).strip()


def escape_markdown(text: str) -> str:
    """Text that Markdown shows as it is: no markup, no link, no new cell."""
    text = one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~$#])", r"\\\1", text)


def escape_latex(text: str) -> str:
    escaped = "".join(_LATEX.get(each, each) for each in one_line(text))
    return re.sub(r"(?<![\w-])-(?=\.?\d)", "$-$", escaped)  # a minus sign, not a hyphen
