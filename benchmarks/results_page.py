"""Write docs/results.md and docs/experiments/2026-11-comparisons.md from the JSON files in docs/results.

    python benchmarks/results_page.py                    # write the pages again
    python benchmarks/results_page.py --check            # exit 1 when they are not what the files say

The sentences are in the templates (*_page.md.j2) and docs/results/notes.json; every figure of a table
comes from the files. `benchmarks/lab_picture.py` and `publish_run.py` put them there.
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import jinja2
from marked_tables import wrap_prose

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
RESULTS = DOCS / "results"
PAGES = {  # template → page
    "results_page.md.j2": DOCS / "results.md",
    "comparisons_page.md.j2": DOCS / "experiments" / "2026-11-comparisons.md",
}
REPRODUCTIONS = HERE.parent / "src" / "bert4rec" / "reproductions"
COMMANDS = {
    "ml-1m": """\
LAB="bert4rec lab ml-1m.txt.gz --seeds 1 --set model.max_len=200 --out runs/lab-ml-1m"
$LAB --models sasrec+ --budget 18m \\
    --set training.batch_size=64 --set stages.0.learning_rate=1e-3
$LAB --models gru4rec-ce --budget 7m
$LAB --models sasrec --budget 6m
$LAB --models bert4rec-2-stage --budget 6m
$LAB --models fpmc,bert4rec,bert4rec-1-mask,narm,stamp,gru4rec,gru4rec+ --budget 2m
$LAB --models caser,gsasrec,sasrec+3000,neumf,cdae --budget 2m
bert4rec lab ml-1m.txt.gz --seeds 1 --out runs/lab-ml-1m \\
    --models popularity,markov,item-knn,bpr-mf""",
    "beauty": """\
LAB="bert4rec lab beauty.txt.gz --seeds 1 --set model.max_len=50 --out runs/lab-beauty"
bert4rec lab beauty.txt.gz --seeds 1 --out runs/lab-beauty --models popularity,bpr-mf,markov
$LAB --models sasrec+ --budget 3m --set model.dim=64 \\
    --set training.batch_size=64 --set stages.0.learning_rate=1e-3
$LAB --models bert4rec --budget 3m --set stages.0.mask_ratio=0.6 \\
    --set training.batch_size=128 --set stages.0.learning_rate=2e-3
$LAB --models sasrec+3000 --budget 5m""",
}
# By reproduction: the contenders whose run in the lab had its settings but for the budget, as they
# were compared at revision cb200a4. The others get no verdict, nor do runs of SHORT minutes.
PUBLISHED: dict[str, dict[str, tuple[str, ...]]] = {
    "ml-1m": {
        "full-ranking-ml-1m": ("bpr-mf", "gru4rec-ce", "sasrec", "sasrec+", "gsasrec"),
        "sasrec-vs-bert4rec": (),
        "table-2-ml-1m": ("popularity", "bpr-mf", "neumf", "fpmc", "gru4rec", "gru4rec+", "caser", "sasrec"),
    },
    "beauty": {"sasrec-vs-bert4rec-beauty": (), "table-2-beauty": ("popularity", "bpr-mf")},
}
SHORT = 2  # minutes
VERDICTS_EXPLAINED = (
    "`pass`: within the tolerance of `bert4rec reproduce`. `miss by`: outside it, by this much. No verdict: the run "
    f"had other settings, or it was trained for {SHORT} minutes only. The budget of a longer run is in brackets."
)
NAMES = {"POP": "Popularity"}  # one name per model on these pages
REPORT_FILES = ("report.html", "report.csv", "report.json")
RUN_ROWS = {"popularity": "popularity.json", "Markov chain": "markov.json", "BERT4Rec": "metrics.json"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    for template, page in PAGES.items():
        text = wrap_prose(rendered(template))
        if not arguments.check:
            page.write_text(text, encoding="utf-8")
        elif page.read_text(encoding="utf-8") != text:
            sys.exit(f"{page.name} is not what its JSON files say: run benchmarks/results_page.py")


def rendered(template: str) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template(template).render(
        lab_block=lab_block,
        published_block=published_block,
        verdicts_explained=VERDICTS_EXPLAINED,
        run_table=run_table,
        run_facts=run_facts,
        claims=list(ml_1m_claims(lab("ml-1m"))),
        notes={name: " ".join(lines) for name, lines in read("notes.json").items()},
        footprint=read("footprint.json"),
    )


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def lab(name: str) -> dict[str, Any]:
    return read(f"lab-{name}/report.json")


def number(value: float) -> str:
    return f"{value:.4f}".lstrip("0")


def signed(value: float) -> str:
    return ("+" if value >= 0 else "−") + number(abs(value))


def lab_block(name: str) -> str:
    result = lab(name)
    folder = f"results/lab-{name}"
    facts, n_seeds = result["facts"], len(result["facts"]["seeds"])
    machine = facts["machine"]
    files = ", ".join(f"[{file}]({folder}/{file})" for file in REPORT_FILES)
    columns = ["model", "HR@10", "NDCG@10", "95 % interval", "popularity", "uniform", "training", "budget", "epochs"]
    lines = [
        f"```\n{COMMANDS[name]}\n```",
        f"{result['n_users']:,} users, {facts['data']['n_items']:,} items, seeds: {n_seeds}, "
        f"{machine['cores']} cores ({machine['cpu']}). Intervals, paired differences, "
        f"curves, costs and settings: {files}. The columns “popularity” and “uniform” are NDCG@10.\n",
        "| " + " | ".join(columns) + " |",
        "|---|" + "---:|" * (len(columns) - 1),
    ]
    lines += [lab_row(model) for model in result["models"]]
    for run in result["missing"]:
        reason = run["error"] or "not finished"
        lines.append(f"| {run['title']} | no result: {reason} | | | | | | | |")
    lines.append(f"\n![NDCG@10 of all models](images/lab-{name}.png)\n")
    return "\n".join(lines)


def lab_row(model: dict[str, Any]) -> str:
    figures, epochs, budget = model["figures"], mean_cost(model, "epochs"), budget_of(model)
    score, seconds = figures["full"]["NDCG@10"], mean_cost(model, "training_seconds")
    cells = [
        title_of(model),
        number(figures["full"]["HR@10"]["value"]),
        f"**{number(score['value'])}**",
        f"{number(score['low'])}–{number(score['high'])}",
        number(figures["popularity"]["NDCG@10"]["value"]),
        number(figures["uniform"]["NDCG@10"]["value"]),
        "–" if seconds is None else f"{seconds / 60:.1f} min",
        "–" if budget is None else f"{budget:g} min",
        "–" if epochs is None else f"{epochs:g}",
    ]
    return "| " + " | ".join(cells) + " |"


def title_of(model: dict[str, Any]) -> str:
    return NAMES.get(model["title"], model["title"])


def mean_cost(model: dict[str, Any], name: str) -> float | None:
    known = [cost[name] for cost in model["costs"] if cost[name] is not None]
    return mean(known) if known else None


def budget_of(model: dict[str, Any]) -> float | None:
    """Minutes; None for a model that is fitted in one pass and needs no budget."""
    known = [cost["budget_minutes"] for cost in model["costs"] if cost["epochs"] is not None]
    return max((each for each in known if each is not None), default=None)


def score_of(model: dict[str, Any]) -> float:
    return float(model["figures"]["full"]["NDCG@10"]["value"])


def ml_1m_claims(result: dict[str, Any]) -> Iterator[dict[str, str]]:
    """The claims of issue 4 about this table. One seed each: a small difference may be chance."""
    models = {model["name"]: model for model in result["models"]}
    titles = {name: title_of(model) for name, model in models.items()}

    def ours(name: str) -> str:
        budget = budget_of(models[name])
        return number(score_of(models[name])) + (f" ({budget:g} min)" if budget else "")

    def order(*names: str) -> dict[str, str]:
        holds = all(score_of(models[a]) < score_of(models[b]) for a, b in pairwise(names))
        return {
            "says": "NDCG@10 over all items: " + " < ".join(titles[name] for name in names),
            "ours": ", ".join(map(ours, names)),
            "verdict": "pass" if holds else "miss",
        }

    def at_least(name: str, wanted: float, published: float) -> dict[str, str]:
        short = wanted - score_of(models[name])
        return {
            "says": f"{titles[name]}: NDCG@10 at least {number(wanted)} (published {number(published)})",
            "ours": ours(name),
            "verdict": "pass" if short <= 0 else f"miss by {number(short)}",
        }

    yield order("popularity", "bpr-mf", "sasrec", "sasrec+")
    yield order("bpr-mf", "markov")
    yield order("bpr-mf", "fpmc")
    yield at_least("sasrec+", 0.17, 0.1821)
    yield at_least("gru4rec-ce", 0.14, 0.1648)


def published_block(name: str) -> str:
    """The lab's figures beside published ones, by the tolerances of `bert4rec reproduce`.

    A verdict is given where the lab's run has the settings of the reproduction; the training time
    is the lab's, so this says how far a short run on two cores gets.
    """
    models = {model["name"]: model for model in lab(name)["models"]}
    lines = []
    for reproduction, judged in PUBLISHED[name].items():
        about = tomllib.loads((REPRODUCTIONS / f"{reproduction}.toml").read_text(encoding="utf-8"))
        tolerance = about["tolerance"]
        lines += [f"\n**{about['title']}** (`bert4rec reproduce {reproduction}`)\n"]
        columns = ("model", "metric", "published", "ours", "difference", "verdict")
        lines += ["| " + " | ".join(columns) + " |", "|---|---|---:|---:|---:|---|"]
        sources: dict[str, list[str]] = {}
        for each in about["contenders"]:
            model = models.get(each.get("recipe", ""))
            for metric in ("HR@10", "NDCG@10"):
                if model is None or metric not in each.get("published", {}):
                    continue
                published = each["published"][metric]
                ours = model["figures"][about["protocol"]][metric]["value"]
                room = max(tolerance["absolute"], tolerance["relative"] * published)
                outside = abs(ours - published) - room
                cells = (
                    each["title"],
                    metric,
                    number(published),
                    number(ours),
                    signed(ours - published),
                    verdict(outside, budget_of(model), each["name"] in judged),
                )
                lines.append("| " + " | ".join(cells) + " |")
                models_of_source = sources.setdefault(each.get("source", about["source"]), [])
                if each["title"] not in models_of_source:
                    models_of_source.append(each["title"])
        if len(sources) == 1:
            lines.append(f"\nPublished figures: {next(iter(sources))}.")
        else:
            lines.append("\nPublished figures:")
            lines += [f"- {source}: {'; '.join(titles)}" for source, titles in sources.items()]
    return "\n".join(lines) + "\n"


def verdict(outside: float, budget: float | None, has_same_settings: bool) -> str:
    if not has_same_settings:
        return "no verdict: other settings"
    if budget is not None and budget <= SHORT:
        return f"no verdict: {SHORT} minutes"
    # Figures have four digits: a tenth of the last one is not a difference.
    said = "pass" if outside <= 1e-5 else f"miss by {number(outside)}"
    return said if budget is None else f"{said} ({budget:g} minutes)"


def run_table(name: str) -> str:
    protocols = (("full", ""), ("popularity", ", popularity"), ("uniform", ", uniform"))
    columns = [(p, m, f"{m}{what}") for p, what in protocols for m in ("HR@10", "NDCG@10")]
    lines = ["| model | " + " | ".join(title for *_, title in columns) + " |", "|---|" + "---:|" * len(columns)]
    is_causal = read(f"{name}/config.json")["model"]["name"] == "bert4rec-causal"
    for title, file in RUN_ROWS.items():
        title = f"{title}-causal" if is_causal and title == "BERT4Rec" else title
        metrics = read(f"{name}/{file}")["metrics"]
        lines.append(f"| {title} | " + " | ".join(number(metrics[p][m]["value"]) for p, m, _ in columns) + " |")
    return "\n".join(lines)


def run_facts(name: str) -> str:
    events = [json.loads(line) for line in (RESULTS / name / "log.jsonl").read_text().splitlines()]
    best: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["ndcg@10"] > best.get(event["stage"], {"ndcg@10": -1.0})["ndcg@10"]:
            best[event["stage"]] = event
    epochs = {event["stage"]: event["epoch"] for event in events}  # the last of each stage
    stages = ", then ".join(
        f"{epochs[stage]} epochs of `{stage}` to {number(event['ndcg@10'])}" for stage, event in best.items()
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
