"""A model whose item vectors are too many for one machine: each process keeps some of the rows.

A step needs the vectors of its own batch and of its negatives only. They are fetched from where
they live into a small model that knows just these items, the step is computed with it as ever, and
their gradients go back to the owners, who keep the optimiser's moments and move the rows.
Everything else is small and the same in every process.

For sampled losses: a softmax over all items would need all the vectors in every step. All positions
of a process share one draw of negatives a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from bert4rec.config import Config
from bert4rec.data.splits import Questions, Spans
from bert4rec.models.learned import Learned
from bert4rec.models.table import Table
from bert4rec.parallel import Workers
from bert4rec.training.batches import Batch
from bert4rec.training.checkpoint import State
from bert4rec.training.distributed import Ranks
from bert4rec.training.exchange import Exchange
from bert4rec.training.gradients import Gradients
from bert4rec.training.hardware import Hardware
from bert4rec.training.losses import SHARED_FROM, AmongTargets, InBatch, Loss, Sampled
from bert4rec.training.negatives import Negatives
from bert4rec.training.optimizer import Optimizer
from bert4rec.training.replica import Stepped, ToldByAll, check_is_number, every_nth, share_of
from bert4rec.training.rows import DealtRows
from bert4rec.training.sharded_ranks import ranks_among_all

AT_ONCE = 256  # questions that a process answers at a time
MODELS = ("bert4rec", "sasrec")  # one table of items, which is also the output
ROWS = ("items.weight", "output_bias")  # what is dealt out; all models have the first


class _OfThisStep(Negatives):
    """Negatives that were drawn and fetched before the step; by the small model's numbers."""

    def __init__(self, all_items: Negatives) -> None:
        self.all_items = all_items

    def set(self, items: Tensor, drawn: Tensor) -> None:
        """(U,) which items the small model has, and which of them were drawn."""
        self.items, self.drawn = items, drawn[None]

    def draw(self, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        assert shape == self.drawn.shape
        return self.drawn

    def log_expected(self, items: Tensor, n: int) -> Tensor:
        return self.all_items.log_expected(self.items[items], n)


KEEPS_NO_STAGES = (
    "training.keep_stages does not go with training.shard_items: no process has the whole model"
)


class ShardedItems:
    """A `Trainee` for as many items as `bias` has, where the bias of their scores starts.

    `small` knows `room` of them at a time.
    """

    def __init__(
        self,
        small: Learned,
        bias: Tensor,
        loss: Loss,
        config: Config,
        workers: Workers,
        hardware: Hardware,
        ranks: Ranks,
    ) -> None:
        self.small, self.n_items, self.ranks = small, len(bias), ranks
        self.config, self.room, self.n_negatives = config.training, small.n_items, 0
        self.negatives = _take_negatives(loss)
        if isinstance(loss, Sampled):
            self.n_negatives = config.training.n_negatives
        self.gradients = Gradients(small, loss, workers, hardware, rank=ranks.rank)
        table = small.get_submodule("items")
        assert isinstance(table, Table)
        self.table, self.dealt = table, DealtRows(ranks)
        self.n_special = len(table.weight) - self.room  # PAD and, of some, MASK
        self.own = _Own(small, self.dealt, bias, self.n_special, config)
        self.rest = self.own.rest
        self.exchange = Exchange(self.rest, ranks)
        self.best = self._copy()
        self.start_afresh()

    def start_afresh(self) -> None:
        self.optimizer = Optimizer(self.own, self.config, is_sparse=True)

    def step(self, batch: Batch, seed: int, learning_rate: float, told: ToldByAll) -> Stepped:
        self.small.train()
        (n_asked,) = self.ranks.sums(batch.n_asked)
        random = np.random.SeedSequence([seed, self.ranks.rank, 1]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(random >> 1))
        drawn = self.negatives.all_items.draw((1, self.n_negatives), generator)[0]
        parts = [part for piece in batch.pieces for part in (piece.tokens.flatten(), piece.targets)]
        items = self._fill(torch.cat([*parts, drawn]))
        self.negatives.set(items, torch.searchsorted(items, drawn))
        pieces = [
            p._replace(tokens=self._local(items, p.tokens), targets=self._local(items, p.targets))
            for p in batch.pieces
        ]
        local = Batch(pieces, batch.n_sequences, batch.n_asked)
        loss = self.gradients.add(local, seed, share=1 / n_asked)
        self._give_gradients(len(items))
        # They are parts of the mean already: all together count as one question.
        loss, *sums = self.exchange.add_up(1 / self.ranks.n, (loss, *told))
        check_is_number(loss)
        self.optimizer.step(learning_rate, self._length_of_gradient())
        return Stepped(loss, ToldByAll(*sums))

    def _fill(self, tokens: Tensor) -> Tensor:
        """Fetch the vectors of these tokens into the small model; returns its items, sorted."""
        unique: Tensor = torch.unique(tokens)
        items = unique[unique < self.n_items]
        assert len(items) <= self.room
        special = torch.arange(self.n_items, self.n_items + self.n_special)
        self.asked = self.dealt.ask(torch.cat([items, special]))
        vectors = self.dealt.fetch(self.own.items.weight, self.asked)
        with torch.no_grad():
            self.table.weight[: len(items)] = vectors[: len(items)]
            self.table.weight[self.room :] = vectors[len(items) :]
        bias, own = getattr(self.small, "output_bias", None), self.own.output_bias
        if bias is not None and own is not None:
            self.asked_bias = self.dealt.ask(items)
            with torch.no_grad():
                bias[: len(items)] = self.dealt.fetch(own, self.asked_bias)
        return items

    def _local(self, items: Tensor, tokens: Tensor) -> Tensor:
        """Tokens of the whole catalogue by the numbers of the small model."""
        local = torch.searchsorted(items, tokens)
        result: Tensor = torch.where(
            tokens < self.n_items, local, tokens - self.n_items + self.room
        )
        return result

    def _give_gradients(self, n: int) -> None:
        grad = self.table.weight.grad
        if grad is None:
            grad = torch.zeros_like(self.table.weight)
        elif grad.is_sparse:
            grad = grad.to_dense()
        values = torch.cat([grad[:n], grad[self.room :]])
        received = self.dealt.give(values, self.asked)
        place, shape = self.asked.theirs[None], tuple(self.own.items.weight.shape)
        self.own.items.weight.grad = torch.sparse_coo_tensor(
            place, received, shape, check_invariants=False
        )
        if self.table.weight.grad is not None and not self.table.weight.grad.is_sparse:
            self.table.weight.grad.zero_()
        else:
            self.table.weight.grad = None
        bias, own = getattr(self.small, "output_bias", None), self.own.output_bias
        if bias is not None and own is not None:
            grad = torch.zeros_like(bias) if bias.grad is None else bias.grad
            received = self.dealt.give(grad[:n], self.asked_bias)
            own.grad = torch.zeros_like(own).index_add_(0, self.asked_bias.theirs, received)
            bias.grad = None

    def _length_of_gradient(self) -> float:
        """The same number in every process: the rows of all, and the rest of one."""
        rows = self.own.items.weight.grad
        assert rows is not None
        self.own.items.weight.grad = rows = rows.coalesce()
        square = float(rows.values().double().square().sum())
        if self.own.output_bias is not None and self.own.output_bias.grad is not None:
            square += float(self.own.output_bias.grad.double().square().sum())
        gradients = [p.grad for p in self.rest.parameters() if p.grad is not None]
        rest = sum(float(grad.double().square().sum()) for grad in gradients)
        return float((self.ranks.sums(square)[0] + rest) ** 0.5)

    @torch.inference_mode()
    def ranks_of(self, questions: Questions, *, exclude_seen: bool) -> Tensor:
        """Vectors of the asked histories go to all, and each compares its own items."""
        self.small.eval()
        n, rank = self.ranks.n, self.ranks.rank
        mine = every_nth(questions, rank, n)
        found = torch.zeros(len(questions), dtype=torch.int64)
        n_rounds = -(-len(every_nth(questions, 0, n)) // AT_ONCE)
        for number in range(n_rounds):
            rows = np.arange(number * AT_ONCE, min((number + 1) * AT_ONCE, len(mine)))
            histories, targets = mine.histories.take(rows), torch.from_numpy(mine.targets[rows])
            h, wanted = self._asked(histories, targets)
            every = np.arange(len(rows))
            seen = torch.from_numpy(histories.padded(every, self.n_items))
            found[rank::n][rows] = ranks_among_all(
                self.ranks,
                h,
                wanted,
                targets,
                seen if exclude_seen else seen[:, :0],
                *self.own.output(),
            )
        return self.ranks.total(found)

    def _asked(self, histories: Spans, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(B, D) the vectors that are asked for, and (B,) the scores of the targets."""
        starts = np.maximum(histories.starts, histories.ends - self.small.max_len)
        read = Spans(histories.tokens, starts, histories.ends, histories.users)
        padded = torch.from_numpy(read.padded(np.arange(len(read)), self.n_items))
        items = self._fill(torch.cat([padded.flatten(), targets]))
        if not len(read):
            return self.table.weight.new_zeros(0, self.table.embedding_dim), targets.float()
        tokens, at = self.small.question(self._local(items, padded))
        h = self.small.asked(tokens, at, torch.from_numpy(read.users))
        local = self._local(items, targets)[:, None]
        return h, self.small.output().scores(h, local)[:, 0]

    def keep_best(self) -> None:
        self.best = self._copy()

    def use_best(self) -> None:
        self.own.load_state_dict(self.best)

    def save_best(self, path: Path) -> None:
        raise ValueError(KEEPS_NO_STAGES)

    def state(self) -> State:
        self.ranks.alike(self.rest.parameters())
        return State(
            self._own_share(self.own.state_dict()),
            self._own_share(self.optimizer.tensors()),
            self._own_share(self.best),
        )

    def restore(self, state: State) -> None:
        self.own.load_state_dict(self._own_part(state.weights))
        self.optimizer.restore(self._own_part(state.optimizer))
        self.best = self._own_part(state.best)

    def finish(self, model: Learned) -> None:
        """The first process gets the whole table, a block at a time, for which it needs the memory;
        the model of the others stays a shell."""
        self.use_best()
        del self.optimizer, self.best, self.gradients
        own, is_first = self.own.state_dict(), self.ranks.is_first
        if is_first:
            model.to_empty(device="cpu")
            model.no_bias.zero_()
            rest = {name: tensor for name, tensor in own.items() if name not in ROWS}
            model.load_state_dict(rest, strict=False)
        for name in ROWS:
            if name in own:
                target = model.get_parameter(name).detach() if is_first else None
                _collect(own[name], target, self.ranks)
        model.eval()

    def _copy(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.own.state_dict().items()}

    def _own_share(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Own rows under a name that says whose they are, and a share of what all have."""
        whose = f"@{self.ranks.rank}/{self.ranks.n}"
        own = {f"{k}{whose}": t for k, t in tensors.items() if _is_dealt(k) and t.ndim}
        rest = {k: t for k, t in tensors.items() if f"{k}{whose}" not in own}
        return own | share_of(rest, self.ranks)

    def _own_part(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this process needs of a checkpoint, whatever the processes that wrote it."""
        n, rank = self.ranks.n, self.ranks.rank
        part = {name: tensors[name] for name in tensors if "@" not in name}
        for name, tensor in part.items():
            if _is_dealt(name) and tensor.ndim:  # of a training that was not sharded
                part[name] = tensor[rank::n].clone()
        dealt = sorted({name.partition("@")[0] for name in tensors if "@" in name})
        for name in dealt:
            pieces = {
                tuple(map(int, key.partition("@")[2].split("/"))): key
                for key in tensors
                if key.partition("@")[0] == name
            }
            if (rank, n) in pieces:
                part[name] = tensors[pieces[rank, n]]
                continue
            is_vector = name.endswith("output_bias")
            n_rows = self.n_items + (0 if is_vector else self.n_special)
            rows = torch.arange(rank, n_rows, n)
            for (owner, n_owners), key in pieces.items():
                theirs = tensors[key]
                if name not in part:
                    part[name] = theirs.new_empty(len(rows), *theirs.shape[1:])
                is_here = rows % n_owners == owner
                part[name][is_here] = theirs[rows[is_here] // n_owners]
        return part


class _Own(nn.Module):
    """The parameters that this process moves: its rows, and the rest of the model."""

    output_bias: nn.Parameter | None

    def __init__(
        self, small: Learned, dealt: DealtRows, bias: Tensor, n_special: int, config: Config
    ) -> None:
        super().__init__()
        rank, n_items = dealt.ranks.rank, len(bias)
        n_rows = n_items + n_special
        generator = torch.Generator().manual_seed(config.training.seed * 1_000_003 + rank)
        self.items = Table(dealt.n_own(n_rows), config.model.dim, sparse=True)
        nn.init.trunc_normal_(self.items.weight, std=0.02, a=-0.04, b=0.04, generator=generator)
        small.prepare_item_vectors(self.items.weight)
        rows = torch.arange(rank, n_rows, dealt.ranks.n)
        is_special = rows >= n_items  # PAD and MASK start as in the small model
        with torch.no_grad():
            theirs = small.get_parameter("items.weight")[small.n_items :]
            self.items.weight[is_special] = theirs[rows[is_special] - n_items]
        self.n_items = dealt.n_own(n_items)
        has_bias = hasattr(small, "output_bias")
        own_bias = bias[rank :: dealt.ranks.n].clone()
        self.output_bias = nn.Parameter(own_bias) if has_bias else None
        for name, child in small.named_children():
            if name != "items":
                self.add_module(name, child)

    @property
    def rest(self) -> nn.Module:
        rest = nn.Module()
        for name, child in self.named_children():
            if name != "items":
                rest.add_module(name, child)
        return rest

    def output(self) -> tuple[Tensor, Tensor]:
        """Vectors and biases of own items, without PAD and MASK, which come last."""
        weight = self.items.weight[: self.n_items]
        bias = self.output_bias
        return weight, weight.new_zeros(self.n_items) if bias is None else bias


def check_can_shard(config: Config, n_ranks: int) -> None:
    """Before any work is done: what cannot be sharded, and what to do instead."""
    training = config.training
    if n_ranks == 1:
        raise ValueError(
            "training.shard_items deals the item vectors out over several processes, and there is "
            "one: start more, with --processes or torchrun"
        )
    if config.model.name not in MODELS:
        raise ValueError(
            f"training.shard_items works for {' and '.join(MODELS)}, not for {config.model.name}"
        )
    if training.loss == "cross-entropy":
        raise ValueError(
            "training.shard_items needs a loss that touches some items only, and cross-entropy "
            "touches all: add --set training.loss=sampled-softmax"
        )
    if training.keep_stages:
        raise ValueError(KEEPS_NO_STAGES)
    is_drawn = training.loss != "in-batch" and training.negatives != "in-batch"
    if is_drawn and training.n_negatives < SHARED_FROM:
        raise ValueError(
            f"training.shard_items and training.n_negatives = {training.n_negatives}: the "
            f"positions of a step share their negatives, so draw {SHARED_FROM} or more"
        )
    if training.device not in ("auto", "cpu") or training.compile:
        raise ValueError("training.shard_items works on CPUs, and without --compile")


def room_for(config: Config, n_items: int, n_sequences: int) -> int:
    """The most items that a step of so many sequences, or an answer, can touch."""
    is_mixed = config.training.replacement != "mask"  # then another item stands before a target
    a_sequence = (config.model.max_len + 1) * (2 if is_mixed else 1)
    in_batch = n_sequences * a_sequence + config.training.n_negatives
    in_answer = AT_ONCE * (config.model.max_len + 1)
    return min(n_items, max(in_batch, in_answer))


def _take_negatives(loss: Loss) -> _OfThisStep:
    """Put the negatives of a step in the place of those that the loss would draw."""
    if isinstance(loss, Sampled | InBatch):
        loss.negatives = negatives = _OfThisStep(loss.negatives)
        return negatives
    assert isinstance(loss, AmongTargets)
    loss.popularity = popularity = _OfThisStep(loss.popularity)
    return popularity


def _is_dealt(name: str) -> bool:
    return name.endswith(ROWS)


BLOCK = 1 << 16  # rows that travel at a time


def _collect(own: Tensor, target: Tensor | None, ranks: Ranks) -> None:
    """Everybody's rows into the whole table of the first process."""
    n_rows = int(ranks.sums(len(own))[0])
    for first in range(0, -(-n_rows // ranks.n), BLOCK):
        part = own.new_zeros(BLOCK, *own.shape[1:])
        some = own[first : first + BLOCK]
        part[: len(some)] = some
        received = ranks.by_rank(part)
        if target is not None:
            for rank, block in enumerate(received):
                rows = torch.arange(rank, n_rows, ranks.n)[first : first + BLOCK]
                target[rows] = block[: len(rows)]
