"""Put every setting with its default and meaning into docs/reference/settings.md.

python benchmarks/settings_page.py              # write the tables again
python benchmarks/settings_page.py --check      # exit 1 when the classes say otherwise
"""

import sys
from functools import partial
from pathlib import Path

from bert4rec.config import Config, EvaluationSettings, TrainingSettings
from bert4rec.data.filters import DataSettings
from bert4rec.losses import LOSSES
from bert4rec.models import MODELS
from bert4rec.objectives import OBJECTIVES
from bert4rec.settings import Settings, description_of

sys.path.append(str(Path(__file__).resolve().parent))
from marked_tables import write_or_check

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "settings.md"
HEADER = ["| setting | default | what it does |", "|---|---|---|"]


def rows(settings: type[Settings], section: str, leave_out: set[str] = frozenset()) -> list[str]:
    return [
        f"| `{section}{key}` | {field.get_default()} | {description_of(settings, key)} |"
        for key, field in settings.model_fields.items()
        if key not in leave_out
    ]


def section(settings: type[Settings], name: str) -> list[str]:
    return [*HEADER, *rows(settings, f"{name}.")]


def models() -> list[str]:
    lines = []
    for name in MODELS:
        settings = MODELS[name].settings_class
        if found := rows(settings, "model.", leave_out={"name"}):
            lines += ["", f"**{name}**", "", *HEADER, *found]
    return lines[1:]


def losses() -> list[str]:
    lines = [*HEADER, f"| `loss.name` | {Config().loss.name} | {', '.join(LOSSES)} |"]
    seen: set[str] = set()
    for name in LOSSES:
        for line in rows(LOSSES[name], "loss.", leave_out={"name"}):
            if line not in seen:
                seen.add(line)
                lines.append(line)
    return lines


def stages() -> list[str]:
    lines = []
    for name in OBJECTIVES:
        found = rows(OBJECTIVES[name], "stages.N.", leave_out={"objective"})
        lines += ["", f"**{name}**", "", *HEADER, *found]
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
