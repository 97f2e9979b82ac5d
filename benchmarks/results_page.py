"""Write docs/results.md from the JSON files in docs/results.

    python benchmarks/results_page.py                    # write the page again
    python benchmarks/results_page.py --check            # exit 1 when it is not what the files say

The sentences are in results_page.md.j2 and docs/results/notes.json; every figure of a table comes
from the files. `benchmarks/lab_picture.py` and `publish_run.py` put them there.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2

from bert4rec.lab.claims import judge_figure, load_reproduction
from bert4rec.lab.lab_result import LabResult, ModelResult

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
RESULTS, PAGE = DOCS / "results", DOCS / "results.md"
COMMANDS = {
    "ml-1m": """\
LAB="bert4rec lab ml-1m.txt.gz --seeds 1 --set model.max_len=200 --out runs/lab-ml-1m"
$LAB --models sasrec+ --budget 18m \\
    --set training.batch_size=64 --set training.learning_rate=1e-3
$LAB --models gru4rec-ce --budget 7m
$LAB --models sasrec --budget 6m
$LAB --models bert4rec-2-stage --budget 6m
$LAB --models fpmc,bert4rec,bert4rec-1-mask,narm,stamp,gru4rec,gru4rec+ --budget 2m
$LAB --models caser,gsasrec,sasrec+3000,neumf,cdae --budget 2m
$LAB --models popularity,markov,item-knn,bpr-mf""",
    "beauty": """\
LAB="bert4rec lab beauty.txt.gz --seeds 1 --set model.max_len=50 --out runs/lab-beauty"
$LAB --models popularity,bpr-mf,markov
$LAB --models sasrec+ --budget 3m --set model.dim=64 \\
    --set training.batch_size=64 --set training.learning_rate=1e-3
$LAB --models bert4rec --budget 3m --set training.mask_ratio=0.6 \\
    --set training.batch_size=128 --set training.learning_rate=2e-3
$LAB --models sasrec+3000 --budget 5m""",
}
PUBLISHED = {
    "ml-1m": ("full-ranking-ml-1m", "sasrec-vs-bert4rec", "table-2-ml-1m"),
    "beauty": ("sasrec-vs-bert4rec-beauty", "table-2-beauty"),
}
REPORT_FILES = ("report.html", "report.csv", "report.json")
RUN_ROWS = {
    "popularity": "popularity.json",
    "Markov chain": "markov.json",
    "BERT4Rec": "metrics.json",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    text = page()
    if arguments.check:
        if PAGE.read_text(encoding="utf-8") != text:
            sys.exit(
                "docs/results.md is not what its JSON files say: run benchmarks/results_page.py"
            )
        return
    PAGE.write_text(text, encoding="utf-8")


def page() -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("results_page.md.j2").render(
        lab_block=lab_block,
        published_block=published_block,
        run_table=run_table,
        run_facts=run_facts,
        claims=list(ml_1m_claims(lab("ml-1m"))),
        notes={name: " ".join(lines) for name, lines in read("notes.json").items()},
        footprint=read("footprint.json"),
    )


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def lab(name: str) -> LabResult:
    return LabResult.from_json(
        (RESULTS / f"lab-{name}" / "report.json").read_text(encoding="utf-8")
    )


def number(value: float) -> str:
    return f"{value:.4f}".lstrip("0")


def signed(value: float) -> str:
    return ("+" if value >= 0 else "−") + number(abs(value))


def lab_block(name: str) -> str:
    result = lab(name)
    folder = f"results/lab-{name}"
    facts, n_seeds = result.facts, len(result.facts.seeds)
    files = ", ".join(f"[{file}]({folder}/{file})" for file in REPORT_FILES)
    columns = [
        "model",
        "HR@10",
        "NDCG@10",
        "95 % interval",
        "NDCG@10, 100 popularity",
        "NDCG@10, 100 uniform",
        "training",
        "budget",
        "epochs",
    ]
    lines = [
        f"```\n{COMMANDS[name]}\n```",
        f"{result.n_users:,} users, {facts.data['n_items']:,} items, seeds: {n_seeds}, "
        f"{facts.machine['cores']} cores ({facts.machine['cpu']}). Intervals, paired differences, "
        f"curves, costs and settings: {files}.\n",
        "| " + " | ".join(columns) + " |",
        "|---|" + "---:|" * (len(columns) - 1),
    ]
    lines += [lab_row(model) for model in result.models]
    for run in result.missing:
        lines.append(f"| {run.title} | no result: {run.error or 'not finished'} | | | | | | | |")
    lines.append(f"\n![NDCG@10 of all models](images/lab-{name}.png)\n")
    return "\n".join(lines)


def lab_row(model: ModelResult) -> str:
    score, epochs = model.score, model.mean_cost("epochs")
    seconds, budget = model.mean_cost("training_seconds"), model.budget_minutes
    cells = [
        model.title,
        number(model.figures["full"]["HR@10"].value),
        f"**{number(score.value)}**",
        f"{number(score.low or 0)}–{number(score.high or 0)}",
        number(model.figures["popularity"]["NDCG@10"].value),
        number(model.figures["uniform"]["NDCG@10"].value),
        "–" if seconds is None else f"{seconds / 60:.1f} min",
        "–" if budget is None or epochs is None else f"{budget:g} min",
        "–" if epochs is None else f"{epochs:g}",
    ]
    return "| " + " | ".join(cells) + " |"


def ml_1m_claims(result: LabResult) -> Iterator[dict[str, str]]:
    """What issue 4 asked of this table. One seed each: a small difference may be chance."""
    models = {model.name: model for model in result.models}

    def ours(name: str) -> str:
        model = models[name]
        is_timed = model.mean_cost("epochs") is not None
        budget = f" ({model.budget_minutes:g} min)" if is_timed and model.budget_minutes else ""
        return number(model.score.value) + budget

    def order(*names: str) -> dict[str, str]:
        holds = all(models[a].score.value < models[b].score.value for a, b in pairwise(names))
        return {
            "says": "NDCG@10 over all items: " + " < ".join(models[name].title for name in names),
            "ours": ", ".join(map(ours, names)),
            "verdict": "holds" if holds else "does not hold",
        }

    def at_least(name: str, wanted: float, published: float) -> dict[str, str]:
        short = wanted - models[name].score.value
        return {
            "says": f"{models[name].title}: {number(wanted)} (published {number(published)})",
            "ours": ours(name),
            "verdict": "reached" if short <= 0 else f"missed by {number(short)}",
        }

    yield order("popularity", "bpr-mf", "sasrec", "sasrec+")
    yield order("bpr-mf", "markov")
    yield order("bpr-mf", "fpmc")
    yield at_least("sasrec+", 0.17, 0.1821)
    yield at_least("gru4rec-ce", 0.14, 0.1648)


def published_block(name: str) -> str:
    """The lab's figures beside published ones, by the tolerances of `bert4rec reproduce`.

    A verdict is given where the lab's run had the settings of the reproduction, which
    lab-same-settings.json says: these runs are older than the present names of settings. The
    training time is the lab's, so this says how far a short run on two cores gets.
    """
    models = {model.name: model for model in lab(name).models}
    lines = []
    for reproduction in (load_reproduction(each) for each in PUBLISHED[name]):
        lines += [f"\n**{reproduction.title}** (`bert4rec reproduce {reproduction.name}`)\n"]
        columns = ("model", "source", "metric", "published", "ours", "difference", "verdict")
        lines += ["| " + " | ".join(columns) + " |", "|---|---|---|---:|---:|---:|---|"]
        same = read("lab-same-settings.json")[name][reproduction.name]
        for each in reproduction.contenders:
            model = models.get(each.recipe or "")
            if model is None:
                continue
            for metric in ("HR@10", "NDCG@10"):
                if metric not in each.published:
                    continue
                published = each.published[metric]
                ours = model.figures[reproduction.protocol][metric].value
                tolerance = reproduction.tolerance.of(published)
                is_within = judge_figure(ours, published, tolerance) == "pass"
                by = abs(ours - published) - tolerance
                text = "within tolerance" if is_within else f"outside, by {number(by)}"
                cells = (
                    each.title,
                    each.source or reproduction.source,
                    metric,
                    number(published),
                    number(ours),
                    signed(ours - published),
                    text if each.name in same else "other settings, no verdict",
                )
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def run_table(name: str) -> str:
    protocols = (
        ("full", "all items"),
        ("popularity", "100 popularity"),
        ("uniform", "100 uniform"),
    )
    columns = [(p, m, f"{m}, {what}") for p, what in protocols for m in ("HR@10", "NDCG@10")]
    lines = [
        "| model | " + " | ".join(title for *_, title in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    is_causal = read(f"{name}/config.json")["model"].get("sees") == "before"
    for title, file in RUN_ROWS.items():
        title = f"{title}-causal" if is_causal and title == "BERT4Rec" else title
        metrics = read(f"{name}/{file}")["metrics"]
        lines.append(
            f"| {title} | "
            + " | ".join(number(metrics[p][m]["value"]) for p, m, _ in columns)
            + " |"
        )
    return "\n".join(lines)


def run_facts(name: str) -> str:
    events = [json.loads(line) for line in (RESULTS / name / "log.jsonl").read_text().splitlines()]
    best: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["ndcg@10"] > best.get(event["stage"], {"ndcg@10": -1.0})["ndcg@10"]:
            best[event["stage"]] = event
    epochs = {event["stage"]: event["epoch"] for event in events}  # the last of each stage
    stages = ", then ".join(
        f"{epochs[stage]} epochs of the {stage} stage to {number(event['ndcg@10'])}"
        for stage, event in best.items()
    )
    score = read(f"{name}/metrics.json")["metrics"]["full"]["NDCG@10"]
    minutes = read(f"{name}/about.json")["training"]["seconds"] / 60
    return (
        f"The training took {minutes:.1f} minutes (validation NDCG@10: {stages}). "
        f"Test NDCG@10 over all items is {number(score['value'])} "
        f"(95 % interval {number(score['low'])}–{number(score['high'])})."
    )


if __name__ == "__main__":
    main()
