"""Write the tables of docs/scaling.md from the cost model of `bert4rec plan`.

    python benchmarks/scale/scaling_page.py              # write them again
    python benchmarks/scale/scaling_page.py --check      # exit 1 when they are not what it says

Only what stands between `<!-- costs: NAME -->` and `<!-- end of costs -->` is written; the rest of
the page is written by hand. Run it after `costs.py` has measured.
"""

import argparse
import json
import re
import sys
from functools import cache
from pathlib import Path

from bert4rec.config import Config, load_config, override_config
from bert4rec.costs.advice import Advice, advise
from bert4rec.costs.assumptions import where_measured
from bert4rec.costs.choices import loss_name
from bert4rec.costs.commands import commands
from bert4rec.costs.machines import Machine, layout_of
from bert4rec.costs.memory import disk_seconds, training_bytes
from bert4rec.costs.model import measured_costs
from bert4rec.costs.words import count, duration, size
from bert4rec.costs.work import step_of
from bert4rec.costs.workload import Workload, workload_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
PREPARED = PAGE.parent / "results" / "scale" / "prepare.json"
BLOCK = re.compile(r"(<!-- costs: (\w+) -->\n).*?(<!-- end of costs -->)", re.DOTALL)
INTERACTIONS = (10**6, 10**8, 10**10)
ITEMS = (10**4, 10**6, 5 * 10**7)
WALL_ITEMS = (10**4, 10**5, 10**6, 10**7, 5 * 10**7)
LENGTH = 50
EPOCHS, SECOND_EPOCHS = 10, 3
COSTS, MACHINE = measured_costs(), Machine()


def settings() -> Config:
    return override_config(
        load_config(), [f"training.epochs={EPOCHS}", f"second_stage.epochs={SECOND_EPOCHS}"]
    )


@cache
def planned(interactions: int, items: int) -> Advice:
    workload = workload_of(interactions=interactions, length=LENGTH, items=items)
    return advise(COSTS, workload, settings(), MACHINE)


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def cases() -> str:
    """Three sizes of data by three of the catalogue."""
    header = ["interactions", "items", "machines", "memory on each", "prepare", "an epoch"]
    header += [f"{EPOCHS} epochs", "then evaluate, index", "score all users", "a request", "loss"]
    rows = []
    for interactions in INTERACTIONS:
        for items in ITEMS:
            row = [count(interactions), count(items)]
            if items > interactions:
                rows.append([*row, *["–"] * 8, "more items than clicks"])
                continue
            advice = planned(interactions, items)
            run = advice.run
            sharded = ", table sharded" if run.is_sharded else ""
            row += [str(run.layout.machines), size(run.memory), duration(advice.preparing)]
            row += [duration(run.epoch), duration(run.total)]
            row += [duration(run.evaluation + run.indexing), duration(advice.scoring.seconds)]
            rows.append([*row, duration(advice.request), loss_name(advice) + sharded])
    return table(header, rows)


def training_commands() -> str:
    """What to type for each case, once the table is prepared."""
    lines = []
    for interactions in INTERACTIONS:
        for items in ITEMS:
            if items > interactions:
                continue
            typed = commands(planned(interactions, items), "default", load_config())
            lines.append(f"# {count(interactions)} interactions, {count(items)} items")
            lines += [each.words for each in typed if each.what.startswith("train")]
    return "```\n" + "\n".join(lines) + "\n```\n"


def walls() -> str:
    """A step of one process, and its memory, with the full softmax and with a sampled one."""
    header = ["items", "full softmax: a step", "memory", "1,024 negatives: a step", "memory"]
    layout, rows = layout_of(MACHINE, 1, 1), []
    for items in WALL_ITEMS:
        row = [count(items)]
        for loss in ("cross-entropy", "sampled-softmax"):
            changes = [f"training.loss={loss}", f"training.workers={layout.workers}"]
            config = override_config(load_config(), [*changes, "training.batch_size=256"])
            step = step_of(config, items, 256, LENGTH, layout.workers)
            workload = Workload(10**6, items, LENGTH, LENGTH * 10**6)
            needed = training_bytes(COSTS, config, workload, layout, is_sharded=False)
            row += [duration(COSTS.step_seconds(step)), size(needed)]
        rows.append(row)
    return table(header, rows)


def preparing() -> str:
    header = ["interactions", "prepare", "the table as CSV", "prepared"]
    rows = []
    for interactions in INTERACTIONS:
        advice = planned(interactions, ITEMS[0])
        sizes = [size(advice.disk["the table"]), size(advice.disk["prepared"])]
        rows.append([count(interactions), duration(advice.preparing), *sizes])
    return table(header, rows) + _checked()


def _checked() -> str:
    """What a large table took here beside what the model says of it, once it was measured."""
    if not PREPARED.is_file():
        return ""
    found = json.loads(PREPARED.read_text(encoding="utf-8"))
    rows, cores = found["prepared"]["n_interactions"], found["machine"]["cores"]
    memory = 2 * 512e6  # half of it is for sorting, as the benchmark gives it
    seconds = COSTS.preparing_seconds(rows, cores)
    seconds += disk_seconds(COSTS, Workload(rows, 2, 1, rows), memory)
    return (
        f"\nMeasured: {count(rows)} interactions, as whole numbers in {found['asked']['files']} "
        f"Parquet files, were prepared in {duration(found['seconds'])} on {cores} cores "
        f"([prepare.json](results/scale/prepare.json)); for as many rows of CSV the model says "
        f"{duration(seconds)}.\n"
    )


def percent(share: float | None) -> str:
    return "not known" if share is None else f"{share:.0%}"


def ranges() -> str:
    """What the stored points cover."""
    points = [point for point in COSTS.points if "error" not in point]

    def between(kind: str, name: str) -> str:
        values = [point[name] for point in points if point["kind"] == kind]
        return f"{count(min(values))} to {count(max(values))}"

    return (
        f"{len(points)} points: training with widths of {between('training', 'dim')}, lengths of "
        f"{between('training', 'length')} and {between('training', 'items')} items; answers from "
        f"{between('answers', 'items')} items; indexes of {between('index', 'items')}; "
        f"{between('preparing', 'rows')} rows prepared; {between('exchange', 'bytes')} bytes of "
        "gradients exchanged."
    )


def errors() -> str:
    header = ["what", "typical error", "largest", "points"]
    rows = [
        [kind, percent(each["typical"]), percent(each["worst"]), str(each["n_points"])]
        for kind, each in COSTS.errors.items()
    ]
    peaks = [point for point in COSTS.points if "planned_mb" in point]
    ratios = sorted(point["planned_mb"] / point["peak_mb"] for point in peaks)
    middle = ratios[len(ratios) // 2]
    return (
        f"{where_measured(COSTS)} {ranges()}\n\n{table(header, rows)}\n"
        f"Memory of training: planned over measured between {ratios[0]:.2f} and {ratios[-1]:.2f}, "
        f"{middle:.2f} in the middle ({len(ratios)} points).\n"
    )


BLOCKS = {
    "cases": cases,
    "commands": training_commands,
    "walls": walls,
    "preparing": preparing,
    "errors": errors,
}


def page(text: str) -> str:
    """The page with its blocks written anew."""
    found = {name for _, name, _ in BLOCK.findall(text)}
    if found != set(BLOCKS):
        sys.exit(f"docs/scaling.md has the blocks {sorted(found)}, not {sorted(BLOCKS)}")
    return BLOCK.sub(lambda match: match[1] + BLOCKS[match[2]]() + match[3], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    before = PAGE.read_text(encoding="utf-8")
    after = page(before)
    if arguments.check and before != after:
        sys.exit(
            "docs/scaling.md is not what measurements.json says: "
            "run benchmarks/scale/scaling_page.py"
        )
    if not arguments.check:
        PAGE.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
