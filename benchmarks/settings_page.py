"""Put every setting with its default and meaning into docs/reference/settings.md.

python benchmarks/settings_page.py              # write the lists again
python benchmarks/settings_page.py --check      # exit 1 when the classes say otherwise
"""

import json
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

from bert4rec.config import Config, EvaluationSettings, TrainingSettings
from bert4rec.data.filters import DataSettings
from bert4rec.losses import LOSSES
from bert4rec.models import MODELS
from bert4rec.objectives import OBJECTIVES
from bert4rec.settings import Settings, description_of

sys.path.append(str(Path(__file__).resolve().parent))
from marked_tables import write_or_check

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "settings.md"


def as_typed(value: Any) -> str:
    """A value as `--set` reads it."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def entry(name: str, default: Any, text: str) -> str:
    words = f"- `{name}` (default `{as_typed(default)}`): {text}"
    return textwrap.fill(words, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def entries(settings: type[Settings], section: str, leave_out: set[str] = frozenset()) -> list[str]:
    return [
        entry(f"{section}{key}", field.get_default(), description_of(settings, key))
        for key, field in settings.model_fields.items()
        if key not in leave_out
    ]


def section(settings: type[Settings], name: str) -> list[str]:
    return entries(settings, f"{name}.")


def models() -> list[str]:
    lines = []
    for name in MODELS:
        settings = MODELS[name].settings_class
        if found := entries(settings, "model.", leave_out={"name"}):
            lines += ["", f"**{name}**", *found]
    return lines[1:]


def losses() -> list[str]:
    lines = [entry("loss.name", Config().loss.name, ", ".join(LOSSES))]
    seen: set[str] = set()
    for name in LOSSES:
        for line in entries(LOSSES[name], "loss.", leave_out={"name"}):
            if line not in seen:
                seen.add(line)
                lines.append(line)
    return lines


def stages() -> list[str]:
    lines = []
    for name in OBJECTIVES:
        found = entries(OBJECTIVES[name], "stages.N.", leave_out={"objective"})
        lines += ["", f"**{name}**", *found]
    return lines[1:]


TABLES = {
    "data": partial(section, DataSettings, "data"),
    "model": models,
    "loss": losses,
    "stages": stages,
    "training": partial(section, TrainingSettings, "training"),
    "evaluation": partial(section, EvaluationSettings, "evaluation"),
}


if __name__ == "__main__":
    write_or_check(PAGE, TABLES, __doc__)
