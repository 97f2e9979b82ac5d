"""BERT4Rec: recommend the next item from what a person did so far.

import bert4rec

data = bert4rec.open_data("clicks.csv")
bert4rec.train_recommender(data, bert4rec.load_config("default"), "runs/model")
recommender = bert4rec.Recommender.load("runs/model")
recommender.recommend(["sku-1", "sku-2"], k=10)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from bert4rec.config import Config, load_config
    from bert4rec.data.filters import Filters
    from bert4rec.data.interactions import Interactions
    from bert4rec.data.prepare import prepare
    from bert4rec.data.sequences import Sequences, Vocabulary
    from bert4rec.data.sources import Reading, open_data
    from bert4rec.data.splits import global_time, leave_one_out
    from bert4rec.evaluation.compare import compare
    from bert4rec.evaluation.evaluate import evaluate
    from bert4rec.pipeline import Outcome, RunOptions, train_recommender
    from bert4rec.recommender import Recommender

# Where each public name lives. It is imported when it is first asked for: `import bert4rec` is
# instant, and only what needs torch loads it.
_HOMES = {
    "Config": "config",
    "Filters": "data.filters",
    "Interactions": "data.interactions",
    "Reading": "data.sources",
    "Outcome": "pipeline",
    "Recommender": "recommender",
    "RunOptions": "pipeline",
    "Sequences": "data.sequences",
    "Vocabulary": "data.sequences",
    "compare": "evaluation.compare",
    "evaluate": "evaluation.evaluate",
    "global_time": "data.splits",
    "leave_one_out": "data.splits",
    "load_config": "config",
    "open_data": "data.sources",
    "prepare": "data.prepare",
    "train_recommender": "pipeline",
}

__all__ = [
    "Config",
    "Filters",
    "Interactions",
    "Outcome",
    "Reading",
    "Recommender",
    "RunOptions",
    "Sequences",
    "Vocabulary",
    "compare",
    "evaluate",
    "global_time",
    "leave_one_out",
    "load_config",
    "open_data",
    "prepare",
    "train_recommender",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"bert4rec.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'bert4rec' has no attribute {name!r}")
