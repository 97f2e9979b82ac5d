"""Times as people write them."""

from __future__ import annotations

import re


def parse_budget(text: str, option: str = "--budget") -> float:
    """Minutes of `90s`, `20m`, `1h` or `1h30m`."""
    number = r"(\d+(?:\.\d+)?)"
    parts = re.fullmatch(f"(?:{number}h)?(?:{number}m)?(?:{number}s)?", text.strip())
    hours, minutes, seconds = (float(part or 0) for part in parts.groups()) if parts else (0.0,) * 3
    total = 60 * hours + minutes + seconds / 60
    if not total:
        raise ValueError(f"{option} is {text!r}: write a time as in 90s, 20m, 1h or 1h30m")
    return total
