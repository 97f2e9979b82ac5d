"""Put the figures of docs/results/quality into the tables of docs/experiments/2026-11-quality.md.

    python benchmarks/quality/quality_page.py            # write the tables again
    python benchmarks/quality/quality_page.py --check    # exit 1 when the files say otherwise

The sentences of the page are typed. A table whose files are missing says so.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from marked_tables import write_or_check

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, RESULTS = DOCS / "experiments" / "2026-11-quality.md", DOCS / "results" / "quality"

# Targets in full ranking (NDCG@10, HR@10) and against 100 popularity negatives (HR@10, NDCG@10).
TARGETS = {
    "ml-1m": {"full": (0.170, 0.300), "popularity": (0.4818, 0.6970)},
    "beauty": {"full": (0.030, 0.050), "popularity": (0.1862, 0.3025)},
}
DATA = {"ml-1m": "ML-1M", "beauty": "Beauty"}
# Figures of others, as in the issue: full ranking HR@10, NDCG@10 and popularity HR@10, NDCG@10.
PUBLISHED = {
    "ml-1m": [
        ("BERT4Rec, the paper (d=256)", None, None, 0.6970, 0.4818),
        ("BERT4Rec, RecTools' replication (d=256)", 0.2921, 0.1618, None, None),
        ("SASRec+, Klenitskiy & Vasilev (3,000 negatives)", 0.3159, 0.1857, None, None),
    ],
    "beauty": [
        ("BERT4Rec, the paper (d=256)", None, None, 0.3025, 0.1862),
        ("BERT4Rec, RecTools' replication (d=256)", 0.0434, 0.0242, None, None),
        ("SASRec softmax, RecTools' replication", 0.0595, 0.0359, None, None),
    ],
}
TITLES = {
    "both-held": "BERT4Rec trained on prefixes",
    "both": "… on validation items too",
    "sasrec+-held": "SASRec+",
    "sasrec+": "… on validation items too",
}
OWN_RECIPE = {"MovieLens-1M": "ml-1m", "Beauty (54,542 items)": "beauty"}  # with both stages kept
CASES = {
    "ml1m": "ML-1M, the last 50 items, 6 + 3 epochs",
    "ml1m200": "ML-1M, the last 200 items, 6 + 3 epochs",
    "beauty": "Beauty, `best-beauty`",
}
INITIALIZATIONS = {"near": "`local`", "identity": "identity, deleted since"}  # of cb200a4
FIRST, SECOND = "first stage", "second stage"
FIRST_CAUSAL = "first stage, as *BERT4Rec-causal*"
# As stages.py names them, and as it did before revision cb200a4.
STAGES = {"stage-0": FIRST, "stage-1": SECOND, "stage-0, causal": FIRST_CAUSAL} | {
    "next-item": FIRST,
    "last-item": SECOND,
    "next-item, sees before": FIRST_CAUSAL,
}


def number(value: float | None, signed: bool = False) -> str:
    if value is None:
        return "–"
    text = f"{value:+.4f}" if signed else f"{value:.4f}"
    return text.replace("0.", ".", 1).replace("-", "−")


def load(name: str) -> Any:
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def runs_of(data: str) -> dict[str, list[dict[str, Any]]]:
    """The kept runs on a data set, `runs/MODEL-DATA[-seed-N].json`, by model in table order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in TITLES:
        for path in sorted((RESULTS / "runs").glob(f"{name}-{data}*.json")):
            found.setdefault(name, []).append(json.loads(path.read_text(encoding="utf-8")))
    return found


def mean(runs: list[dict[str, Any]], protocol: str, metric: str) -> float:
    return sum(run["test"][protocol][metric]["value"] for run in runs) / len(runs)


def results_table(data: str) -> list[str]:
    lines = [
        "| | seeds | HR@10 | NDCG@10 | interval | HR@10, popularity | NDCG@10, popularity | training | validation |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, runs in runs_of(data).items():
        one = runs[0]
        ndcg = [run["test"]["full"]["NDCG@10"] for run in runs]
        low, high = (
            (ndcg[0]["low"], ndcg[0]["high"])
            if len(runs) == 1
            else (min(each["value"] for each in ndcg), max(each["value"] for each in ndcg))
        )
        interval = f"{number(low)}–{number(high)}"
        threads = one["training"]["threads"]
        cores = f" on {threads} core{'s' * (threads > 1)}"
        lines.append(
            f"| {TITLES[name]} | {len(runs)} | {number(mean(runs, 'full', 'HR@10'))} "
            f"| {number(mean(runs, 'full', 'NDCG@10'))} | {interval} "
            f"| {number(mean(runs, 'popularity', 'HR@10'))} "
            f"| {number(mean(runs, 'popularity', 'NDCG@10'))} "
            f"| {one['training']['seconds'] / 60:.0f} min{cores} "
            f"| {number(one['training']['best_validation_ndcg@10'])} |"
        )
    for name, *values in PUBLISHED[data]:
        hit, ndcg_full, hit_sampled, ndcg_sampled = (number(value) for value in values)
        lines.append(f"| {name} | | {hit} | {ndcg_full} | | {hit_sampled} | {ndcg_sampled} | | |")
    return lines


def verdicts_table() -> list[str]:
    judged = ("both-held", "both")
    lines = ["| target | " + " | ".join(TITLES[name] for name in judged) + " |", "|---|" + "---:|" * len(judged)]
    for data, protocols in TARGETS.items():
        runs = runs_of(data)
        for protocol, wanted in protocols.items():
            for metric, aim in zip(("NDCG@10", "HR@10"), wanted, strict=True):
                what = "all items" if protocol == "full" else "100 popularity negatives"
                cells = [f"{DATA[data]}, {what}: {metric} at least {number(aim)}"]
                for name in judged:
                    if name not in runs:
                        cells.append("not run")
                        continue
                    value = mean(runs[name], protocol, metric)
                    verdict = "pass" if value >= aim else f"miss by {number(aim - value)}"
                    cells.append(f"{number(value)}, {verdict}")
                lines.append("| " + " | ".join(cells) + " |")
    return lines


def stages_of(data: str) -> list[dict[str, Any]]:
    """What stages.py wrote for each seed: `DATA.json`, `DATA-seed-N.json`."""
    files = [RESULTS / f"{data}.json", *sorted(RESULTS.glob(f"{data}-seed-*.json"))]
    return [json.loads(path.read_text(encoding="utf-8")) for path in files if path.is_file()]


def stages_table(data: str) -> list[str]:
    seeds = stages_of(data)
    if not seeds:
        return ["Not measured."]
    means = f", means of {len(seeds)} seeds" if len(seeds) > 1 else ""
    lines = [
        f"| NDCG@10 over all items{means} | validation | test | test HR@10 | test NDCG@10, popularity |",
        "|---|---:|---:|---:|---:|",
    ]
    shown = (
        ("validation", "full", "NDCG@10"),
        ("test", "full", "NDCG@10"),
        ("test", "full", "HR@10"),
        ("test", "popularity", "NDCG@10"),
    )
    for name, title in STAGES.items():
        stages = [seed["stages"][name] for seed in seeds if name in seed["stages"]]
        if not stages:
            continue
        cells = []
        for held_out, protocol, metric in shown:
            values = [stage[held_out][protocol][metric]["value"] for stage in stages]
            cells.append(number(sum(values) / len(values)))
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    lines += ["", "| paired difference of NDCG@10 over all items | seed | validation | test |", "|---|---:|---:|---:|"]
    for name in seeds[0]["gains"]:
        b, a = (STAGES[part] for part in name.split(" against "))
        for seed in seeds:
            cells = [f"{b} − {a}", str(seed["recipe"]["training"]["seed"])]
            for held_out in ("validation", "test"):
                differences = seed["gains"][name][held_out]["full"]
                one = next(each for each in differences if each["metric"] == "NDCG@10")
                low, high = number(one["low"], True), number(one["high"], True)
                cells.append(f"{number(one['difference'], True)} ({low} to {high})")
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def ablations_table(data: str) -> list[str]:
    found = load(f"ablations-{data}.json")
    if found is None:
        return ["Not measured."]
    lines = ["| | validation NDCG@10 | HR@10 | minutes on one core |", "|---|---:|---:|---:|"]
    lines += [
        f"| {trial['title']} | {number(trial['validation']['full']['NDCG@10'])} "
        f"| {number(trial['validation']['full']['HR@10'])} | {trial['seconds'] / 60:.1f} |"
        for trial in found
    ]
    return lines


def defaults_table() -> list[str]:
    found = load("defaults.json")
    if found is None:
        return ["Not measured."]
    lines = [
        "| validation NDCG@10, HR@10 (minutes on one core) | `default` | SASRec+, width 64 "
        "| the data set's own recipe |",
        "|---|---:|---:|---:|",
    ]
    for data, trials in found.items():
        cells = [data]
        for recipe in ("default", "sasrec+"):
            trial = trials.get(recipe)
            if trial is None:
                cells.append("not run")
                continue
            full = trial["validation"]["full"]
            minutes = f"{trial['seconds'] / 60:.0f} min"
            cells.append(f"{number(full['NDCG@10'])}, {number(full['HR@10'])} ({minutes})")
        own = load(f"{OWN_RECIPE[data]}.json") if data in OWN_RECIPE else None
        if own is None:
            cells.append("–")
        else:
            stages = {STAGES[name]: stage for name, stage in own["stages"].items()}
            full = stages[SECOND]["validation"]["full"]
            ndcg, hit = (number(full[metric]["value"]) for metric in ("NDCG@10", "HR@10"))
            cells.append(f"{ndcg}, {hit}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def time_table() -> list[str]:
    found = load("time-to-quality.json")
    if found is None:
        return ["Not measured."]
    lines = [f"| | minutes to validation NDCG@10 {number(found['aim'])} | best | minutes run |", "|---|---:|---:|---:|"]
    for tool, curve in found["tools"].items():
        name = {"ours": "ours, `best-ml-1m`", "rectools": "RecTools' BERT4Rec (d=256)"}[tool]
        reached = curve["minutes_to_aim"]
        minutes = curve["curve"][-1]["training_seconds"] / 60
        to_aim = "not reached" if reached is None else f"{reached:.1f}"
        lines.append(f"| {name} | {to_aim} | {number(curve['best_ndcg@10'])} | {minutes:.1f} |")
    return lines


def initialization_table() -> list[str]:
    """Means over the seeds; the names are those of the revision that was run."""
    found = load("initialization.json")
    if found is None:
        return ["Not measured."]
    values: dict[tuple[str, str], list[float]] = {}
    for trial in found["trials"]:
        case = (trial["name"].split("-")[0], trial["initialization"])
        values.setdefault(case, []).append(trial["validation"]["full"]["NDCG@10"])
    lines = ["| | initialization | seeds | validation NDCG@10, mean | by seed |", "|---|---|---:|---:|---|"]
    for (case, chosen), ndcg in values.items():
        by_seed = ", ".join(map(number, ndcg))
        title = f"{CASES[case]} | {INITIALIZATIONS.get(chosen, f'`{chosen}`')}"
        lines.append(f"| {title} | {len(ndcg)} | {number(sum(ndcg) / len(ndcg))} | {by_seed} |")
    return lines


TABLES = {
    "verdicts": verdicts_table,
    "results-ml-1m": lambda: results_table("ml-1m"),
    "results-beauty": lambda: results_table("beauty"),
    "stages-ml-1m": lambda: stages_table("ml-1m"),
    "stages-beauty": lambda: stages_table("beauty"),
    "ablations-ml-1m": lambda: ablations_table("ml-1m"),
    "ablations-beauty": lambda: ablations_table("beauty"),
    "initialization": initialization_table,
    "defaults": defaults_table,
    "time": time_table,
}


if __name__ == "__main__":
    write_or_check(PAGE, TABLES, __doc__)
