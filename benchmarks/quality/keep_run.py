"""Keep settings, metrics and curve of a finished training for the tables of quality_page.py.

python benchmarks/quality/keep_run.py runs/best-ml-1m docs/results/quality/runs/best-ml-1m.json
"""

import argparse
import json
from pathlib import Path

NAMES = ("HR@1", "HR@5", "HR@10", "NDCG@5", "NDCG@10", "MRR")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="directory of a finished training")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    run = arguments.run
    about = json.loads((run / "about.json").read_text())
    metrics = json.loads((run / "metrics.json").read_text())["metrics"]
    kept = {
        "data": {key: about["data"][key] for key in ("n_users", "n_interactions", "fingerprint")},
        "created": about["created"],
        "config": json.loads((run / "config.json").read_text()),
        "training": about["training"],
        "test": {
            protocol: {name: values[name] for name in NAMES if name in values} for protocol, values in metrics.items()
        },
        "curve": [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
