"""How much there is to compute: counts of what a step, a score and a request do.

The names are the keys of `measurements.json`, which has the seconds that one of each takes. Counts
are in billions where they are arithmetic, so that those seconds are readable numbers.

Shapes: rows B, length L, width D, items V, asked positions A, negatives K.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bert4rec.config import Config
from bert4rec.data.pieces import FOR_TRAINING
from bert4rec.retrieval.build import MOST_QUERIES, ROUNDS, TRAINED_A_LIST, n_lists_for
from bert4rec.training.full_softmax import FEWEST_ROWS
from bert4rec.training.losses import SHARED_FROM, leaves_most_alone

BILLION = 1e9
# Products of a block, in units of D², at every position of the history. BERT4Rec's last block has
# keys and values everywhere, and the rest of it where something is asked.
BLOCK = {"bert4rec": 12, "sasrec": 6}
LAST_EVERYWHERE = {"bert4rec": 2, "sasrec": 6}
LAST_ASKED = {"bert4rec": 11, "sasrec": 0}  # with the output head
# Numbers that the optimiser reads or writes for each one that has a dense gradient: AdamW 7, the
# norm 1, the zeroes 1; and to add the gradient of one more worker, 4.
WORDS, WORDS_A_WORKER = 9, 4
# A sampled loss reads few biases, of the targets and of the negatives, but autograd makes a whole
# gradient of each: zeroes, and a sum.
WORDS_A_BIAS = 8
HAS_BIAS = {"bert4rec": 1, "sasrec": 0}

PARALLEL = (  # computed by all workers, each on whole pieces
    "products",
    "elements",
    "attention",
    "softmax products",
    "softmax exponentials",
    "sampled products",
    "bias numbers",
    "pieces",
)


@dataclass(frozen=True)
class Step:
    """A step of training as one process sees it: its share of the batch."""

    model: str
    dim: int
    layers: int
    rows: float
    length: float
    asked: float  # positions, of all rows
    items: int  # rows of its table
    loss: str
    negatives: int
    workers: int
    loss_memory: int = 64 * 2**20
    processes: int = 1  # that share the batch
    is_sharded: bool = False  # each keeps its own rows of the item table only
    share_after: float = 0.0  # of the rows that have a [MASK] after every item

    @property
    def is_sampled(self) -> bool:
        return self.loss != "cross-entropy"

    @property
    def updates_rows_only(self) -> bool:
        return self.is_sampled and leaves_most_alone(self.items)

    @property
    def rows_a_piece(self) -> int:
        return rows_a_piece(self.length)

    @property
    def pieces(self) -> int:
        return max(1, math.ceil(self.rows / self.rows_a_piece))

    @property
    def busiest(self) -> float:
        """The share of the rows that the worker with the most to do has."""
        full, rest = divmod(self.rows, self.rows_a_piece)
        rounds, left_over = divmod(int(full), self.workers)
        most = (rounds + 1) * self.rows_a_piece if left_over else rounds * self.rows_a_piece + rest
        return min(1.0, most / self.rows)

    @property
    def touched(self) -> float:
        """Rows of the item table with a gradient, counted as often as they occur."""
        shared = self.negatives >= SHARED_FROM
        drawn = self.negatives * (self.pieces if shared else self.asked)
        return self.rows * self.length + self.asked + drawn

    @property
    def dense_parameters(self) -> float:
        """Parameters whose whole gradient is made in every step."""
        own = (self.layers * BLOCK[self.model] + 1) * self.dim**2 + self.biases
        return own + (0 if self.updates_rows_only else self.items * self.dim)

    @property
    def biases(self) -> float:
        return HAS_BIAS[self.model] * self.items / (self.processes if self.is_sharded else 1)


def rows_a_piece(length: float) -> int:
    """Sequences that a worker computes at a time."""
    return max(1, int(FOR_TRAINING.positions // max(1.0, length)))


def step_of(config: Config, items: int, rows: float, length: float, workers: int) -> Step:
    """`rows` windows of `length` items by the settings."""
    model, training = config.model, config.training
    asked = length
    if model.name == "bert4rec":
        hidden = max(1.0, training.mask_ratio * length)
        hidden += training.last_item_share * (1 - hidden)
        asked = hidden + training.next_item_share * (length - hidden)
    if training.max_masked is not None:
        asked = min(asked, training.max_masked)
    return Step(
        model.name,
        model.dim,
        model.layers,
        rows,
        length,
        rows * asked,
        items,
        training.loss,
        training.n_negatives,
        workers,
        training.loss_memory_mb * 2**20,
        share_after=training.next_item_share if model.name == "bert4rec" else 0.0,
    )


def step_of_second_stage(step: Step, config: Config) -> Step:
    """The same in the last-item stage: a prefix of random length, and its last item is asked; or
    all from a random item on."""
    if config.second_stage.asks == "every-item":
        return replace(step, asked=step.rows * step.length / 2, share_after=1.0)
    length = max(1.0, step.length * 0.55)  # nine of ten are cut at a random place
    return replace(step, length=length, asked=step.rows, share_after=0.0)


def work_of_step(step: Step) -> dict[str, float]:
    """What the busiest worker computes, and what all wait for."""
    positions, d = step.rows * step.length, step.dim
    everywhere = (step.layers - 1) * BLOCK[step.model] + LAST_EVERYWHERE[step.model]
    products = (positions * everywhere + step.asked * LAST_ASKED[step.model]) * d * d
    asking = step.asked if step.model == "bert4rec" else positions
    attending = (step.layers - 1) * positions + asking
    # A [MASK] after every item goes through all blocks beside the items.
    masks = step.share_after * positions
    products += masks * ((step.layers - 1) * BLOCK[step.model] + 2) * d * d
    attending += masks * (step.layers - 1)
    work = {
        "products": products / BILLION,
        "elements": ((positions + masks) * step.layers + step.asked) * d / BILLION,
        "attention": attending * step.length * d / BILLION,
        "pieces": float(step.pieces * step.layers),
        "softmax products": 0.0,
        "softmax exponentials": 0.0,
        "sampled products": 0.0,
        "bias numbers": 0.0,
    }
    if step.is_sampled:
        work["sampled products"] = step.asked * step.negatives * d / BILLION
        work["bias numbers"] = WORDS_A_BIAS * step.biases * step.pieces / BILLION
    else:
        asked_a_piece = step.asked / step.pieces
        is_twice = step.loss_memory // (4 * step.items) < min(FEWEST_ROWS, asked_a_piece)
        logits = step.asked * step.items / BILLION
        work["softmax products"] = (4 if is_twice else 3) * logits * d
        work["softmax exponentials"] = (2 if is_twice else 1) * logits
    work = {name: amount * step.busiest for name, amount in work.items()}
    words = WORDS + WORDS_A_WORKER * (step.workers - 1)
    work["dense numbers"] = step.dense_parameters * words / BILLION
    # Everybody applies everybody's rows; of a sharded table one fetches rows and updates its own.
    times = 1 if step.processes == 1 else 2 if step.is_sharded else step.processes
    touched = times * step.touched if step.updates_rows_only else 0.0
    work["touched numbers"] = touched * d / BILLION
    work["step"] = 1.0
    return work


def work_of_answer(config: Config, items: float, length: float) -> dict[str, float]:
    """One history read once, and all its scores; `items` are those that are compared."""
    model = config.model
    d, length = model.dim, min(length, model.max_len)
    everywhere = (model.layers - 1) * BLOCK[model.name] + LAST_EVERYWHERE[model.name]
    products = (length * everywhere + LAST_ASKED[model.name]) * d * d
    attention = (model.layers - 1) * length * length * d
    return {
        "products": (products + attention) / BILLION,
        "elements": length * model.layers * d / BILLION,
        "score products": items * d / BILLION,
        "scores": items / BILLION,
        "answers": 1.0,
    }


def work_of_index(items: int, dim: int) -> dict[str, float]:
    """K-means on a sample, every item to its list, and the exact answers that it is measured by."""
    n_lists = n_lists_for(items)
    compared = ROUNDS * min(items, TRAINED_A_LIST * n_lists) * n_lists + items * n_lists
    return {"products": (compared + MOST_QUERIES * items) * dim / BILLION, "start": 1.0}
