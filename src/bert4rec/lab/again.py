"""What to type to run a lab again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from bert4rec.config import load_config, recipe_names
from bert4rec.lab.plan import read_json
from bert4rec.lab.result import LabResult, Planned
from bert4rec.lab.words import plain


def planned(folder: Path, shared: dict[str, Any]) -> Planned:
    """What was typed for the model of this folder, by its `plan.json`.

    An older program did not write that down: then it follows from the settings in it, or, without
    a recipe to compare them with, from those that all models share.
    """
    name, plan = folder.name, read_json(folder / "plan.json") or {}
    budget = plan.get("budget_minutes")
    if "source" in plan:
        return Planned(Path(plan["source"]).name, tuple(map(str, plan["overrides"])), budget)
    if name not in recipe_names():
        return Planned(f"{name}.toml", _overrides(shared), budget)
    if "config" not in plan:
        return Planned(name, _overrides(shared), budget)
    recipe = load_config(name).model_dump(mode="json")
    differing = {
        f"{section}.{key}": value
        for section, values in plan["config"].items()
        for key, value in values.items()
        if recipe.get(section, {}).get(key, value) != value
    }
    return Planned(name, _overrides(differing), budget)


def commands(result: LabResult) -> list[str]:
    """One command, and one more for each other budget or choice of settings that was given."""
    facts = result.facts
    budgets = {model.name: model.budget_minutes for model in result.models}
    groups: dict[tuple[float | None, tuple[str, ...]], list[str]] = {}
    for name in facts.models:
        known = facts.plans.get(name, Planned(name, _overrides(facts.settings), None))
        # Without epochs a budget means nothing, so that of the others will do.
        budget = budgets.get(name, known.budget_minutes)
        budget = facts.budget_minutes if budget is None else budget
        typed = known.source if facts.reproduction is None else name
        groups.setdefault((budget, known.overrides), []).append(typed)
    data = str(facts.data.get("name", "DATA"))
    verb = ["lab", data] if facts.reproduction is None else ["reproduce", facts.reproduction]
    lines = []
    for (budget, overrides), models in groups.items():
        parts = ["bert4rec", *verb, *([] if verb[0] == "lab" else ["--data", data])]
        parts += ["--models", ",".join(models), "--seeds", str(len(facts.seeds))]
        parts += [] if budget is None else ["--budget", f"{budget:g}m"]
        parts += [part for override in overrides for part in ("--set", override)]
        lines.append(" ".join(shlex.quote(plain(part)) for part in parts))
    if own := [name for group in groups.values() for name in group if name.endswith(".toml")]:
        lines.append(f"# settings of one's own, listed above: {plain(', '.join(own))}")
    return lines


def _overrides(settings: dict[str, Any]) -> tuple[str, ...]:
    """As `--set` takes them."""
    return tuple(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in settings.items()
    )
