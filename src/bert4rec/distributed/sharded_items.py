"""Item embeddings too large for one machine: each process keeps a shard of the rows.

A step needs the embeddings of its own batch and of its negatives only. They are fetched from their
owners into a small model that knows just these items, the step is computed with it as ever, and
their gradients go back to the owners, who keep the optimizer's moments and update the rows.
Everything else is small and the same in every process.

For sampled losses: a softmax over all items would need all embeddings in every step. All queries of
a process share one draw of negatives per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from bert4rec.config import RunConfig
from bert4rec.data.splits import HeldOut, Spans
from bert4rec.distributed.sharded_rows import ShardedRows
from bert4rec.item_mask import ItemMask
from bert4rec.losses import Loss
from bert4rec.losses.negatives import Negatives
from bert4rec.losses.sampled import SHARED_FROM, AmongTargets, InBatch, Sampled, SampledSettings
from bert4rec.models.initialization import clear_reserved
from bert4rec.models.kernels.row_embedding import RowEmbedding
from bert4rec.models.sequence_model import SequenceModel, SequenceModelSettings
from bert4rec.scoring import UNREACHABLE
from bert4rec.threads import WorkerThreads
from bert4rec.training.batches import Batch
from bert4rec.training.checkpoint import TrainingTensors
from bert4rec.training.gradients import Gradients
from bert4rec.training.hardware import Hardware
from bert4rec.training.optimizer import Optimizer
from bert4rec.training.process_group import ProcessGroup, StepSignals
from bert4rec.training.replica import StepResult, check_is_number, every_nth, share_of

USERS_AT_ONCE = 256  # held-out users that a process encodes at a time
SCORES_AT_ONCE = 1 << 24
SHARDABLE = ("bert4rec", "sasrec")  # one item embedding, which is also the output
ROWS = ("items.weight", "output_bias")  # what is sharded; all models have the first


class _StepNegatives(Negatives):
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
    "--keep-stages does not go with training.shard_items: no process has the whole model"
)


class ShardedItems:
    """A `Trainee` for as many items as `bias` has, the initial output bias.

    `small` knows a limited number of them at a time.
    """

    def __init__(
        self,
        small: SequenceModel,
        bias: Tensor,
        loss: Loss,
        config: RunConfig,
        workers: WorkerThreads,
        hardware: Hardware,
        group: ProcessGroup,
    ) -> None:
        self.small, self.n_items, self.group = small, len(bias), group
        self.weight_decay, self.capacity = config.training.weight_decay, small.n_items
        self.n_negatives = 0
        self.negatives = _take_negatives(loss)
        if isinstance(loss, Sampled):
            self.n_negatives = loss.n_negatives
        self.gradients = Gradients(small, loss, workers, hardware, rank=group.rank)
        table = small.get_submodule("items")
        assert isinstance(table, RowEmbedding)
        self.table, self.shards = table, ShardedRows(group)
        self.n_special = len(table.weight) - self.capacity  # PAD and, of some, MASK
        self.own = _OwnShard(small, self.shards, bias, self.n_special, config)
        self.rest = self.own.rest
        self.reducer = group.gradient_reducer(self.rest)
        self.best = self._copy()
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        self.optimizer = Optimizer(self.own, self.weight_decay, is_sparse=True)

    def step(self, batch: Batch, seed: int, rate: float, signals: StepSignals) -> StepResult:
        self.small.train()
        (n_queries,) = self.group.sum(batch.n_queries)
        random = np.random.SeedSequence([seed, self.group.rank, 1]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(random >> 1))
        drawn = self.negatives.all_items.draw((1, self.n_negatives), generator)[0]
        parts = [x for each in batch.microbatches for x in (each.tokens.flatten(), each.targets)]
        items = self._fill(torch.cat([*parts, drawn]))
        self.negatives.set(items, torch.searchsorted(items, drawn))
        microbatches = [
            each._replace(
                tokens=self._local(items, each.tokens), targets=self._local(items, each.targets)
            )
            for each in batch.microbatches
        ]
        local = Batch(microbatches, batch.n_sequences, batch.n_queries)
        loss = self.gradients.add(local, seed, scale=1 / n_queries)
        self._send_gradients(len(items))
        # They are parts of the mean already: all together count as one query.
        loss, signals = self.reducer.reduce(1 / self.group.n, loss, signals)
        check_is_number(loss)
        self.optimizer.step(rate, self._length_of_gradient())
        return StepResult(loss, signals)

    def _fill(self, tokens: Tensor) -> Tensor:
        """Fetch the embeddings of these tokens into the small model; returns its items, sorted."""
        unique: Tensor = torch.unique(tokens)
        items = unique[unique < self.n_items]
        assert len(items) <= self.capacity
        special = torch.arange(self.n_items, self.n_items + self.n_special)
        self.request = self.shards.request(torch.cat([items, special]))
        vectors = self.shards.fetch(self.own.items.weight, self.request)
        with torch.no_grad():
            self.table.weight[: len(items)] = vectors[: len(items)]
            self.table.weight[self.capacity :] = vectors[len(items) :]
        bias, own = getattr(self.small, "output_bias", None), self.own.output_bias
        if bias is not None and own is not None:
            self.bias_request = self.shards.request(items)
            with torch.no_grad():
                bias[: len(items)] = self.shards.fetch(own, self.bias_request)
        return items

    def _local(self, items: Tensor, tokens: Tensor) -> Tensor:
        """Tokens of the whole catalogue by the numbers of the small model."""
        local = torch.searchsorted(items, tokens)
        result: Tensor = torch.where(
            tokens < self.n_items, local, tokens - self.n_items + self.capacity
        )
        return result

    def _send_gradients(self, n: int) -> None:
        grad = self.table.weight.grad
        if grad is None:
            grad = torch.zeros_like(self.table.weight)
        elif grad.is_sparse:
            grad = grad.to_dense()
        values = torch.cat([grad[:n], grad[self.capacity :]])
        received = self.shards.send_back(values, self.request)
        place, shape = self.request.theirs[None], tuple(self.own.items.weight.shape)
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
            received = self.shards.send_back(grad[:n], self.bias_request)
            own.grad = torch.zeros_like(own).index_add_(0, self.bias_request.theirs, received)
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
        return float((self.group.sum(square)[0] + rest) ** 0.5)

    @torch.inference_mode()
    def rank(self, held_out: HeldOut, *, exclude_seen: bool) -> Tensor:
        """Vectors of the histories go to all processes, and each scores its own items."""
        self.small.eval()
        n, rank = self.group.n, self.group.rank
        mine = every_nth(held_out, rank, n)
        found = torch.zeros(len(held_out), dtype=torch.int64)
        n_rounds = -(-len(every_nth(held_out, 0, n)) // USERS_AT_ONCE)
        for number in range(n_rounds):
            rows = np.arange(number * USERS_AT_ONCE, min((number + 1) * USERS_AT_ONCE, len(mine)))
            histories, targets = mine.histories.take(rows), torch.from_numpy(mine.targets[rows])
            h, wanted = self._encode(histories, targets)
            seen = torch.from_numpy(histories.padded(np.arange(len(rows)), self.n_items))
            hidden = seen if exclude_seen else seen[:, :0]
            ranks = 1 + self._count_before(h, wanted, targets, hidden)
            is_hidden = (hidden == targets[:, None]).any(1)
            found[rank::n][rows] = ranks.masked_fill(is_hidden, UNREACHABLE)
        return self.group.all_reduce(found)

    def _encode(self, histories: Spans, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(B, D) the vectors of the histories, and (B,) the scores of the targets."""
        assert self.small.max_history is not None
        read = histories.last(self.small.max_history)
        padded = torch.from_numpy(read.padded(np.arange(len(read)), self.n_items))
        items = self._fill(torch.cat([padded.flatten(), targets]))
        if not len(read):
            return self.table.weight.new_zeros(0, self.table.embedding_dim), targets.float()
        h = self.small.encode(torch.from_numpy(read.users), self._local(items, padded))
        local = self._local(items, targets)[:, None]
        return h, self.small.output().scores(h, local)[:, 0]

    def _count_before(self, h: Tensor, wanted: Tensor, targets: Tensor, hidden: Tensor) -> Tensor:
        """(B, D) vectors, (B,) scores of the (B,) targets, (B, L) hidden items → (B,).

        Every process has users of its own and counts for its items in all of them. Ties come before
        the target, as everywhere; the target itself and hidden items do not count.
        """
        group = self.group
        n_rows, length = (
            int(max(sizes)) for sizes in zip(*group.all_gather(hidden.shape), strict=True)
        )
        widened = torch.nn.functional.pad(hidden, (0, length - hidden.shape[1]), value=-1)
        given = ((h, 0.0), (wanted, torch.inf), (targets, -1), (widened, -1))
        all_h, all_wanted, all_targets, all_hidden = (
            torch.cat(group.all_gather_tensor(_padded_rows(tensor, n_rows, filler)))
            for tensor, filler in given
        )
        weight, bias = self.own.output()
        left_out = torch.cat([all_hidden, all_targets[:, None]], 1)
        is_here = (left_out >= 0) & (left_out < self.n_items)
        is_here &= left_out % group.n == group.rank
        users, places = is_here.nonzero(as_tuple=True)
        mask = ItemMask(len(weight), users * len(weight) + left_out[users, places] // group.n)
        n_before = torch.zeros(len(all_h), dtype=torch.int64)
        step = max(1, SCORES_AT_ONCE // max(1, len(all_h)))
        for first in range(0, len(weight), step):
            some = slice(first, first + step)
            scores = torch.addmm(bias[some], all_h, weight[some].T)
            mask.hide(scores, first)
            n_before += (scores >= all_wanted[:, None]).sum(1)
        group.all_reduce(n_before)
        return n_before[group.rank * n_rows :][: len(h)]

    def keep_best(self) -> None:
        self.best = self._copy()

    def load_best(self) -> None:
        self.own.load_state_dict(self.best)

    def save_best(self, path: Path) -> None:
        raise ValueError(KEEPS_NO_STAGES)

    def tensors(self) -> TrainingTensors:
        self.group.synchronize(self.rest.parameters())
        return TrainingTensors(
            self._own_share(self.own.state_dict()),
            self._own_share(self.optimizer.tensors()),
            self._own_share(self.best),
        )

    def restore(self, tensors: TrainingTensors) -> None:
        self.own.load_state_dict(self._own_part(tensors.weights))
        self.optimizer.restore(self._own_part(tensors.optimizer))
        self.best = self._own_part(tensors.best)

    def finish(self, model: SequenceModel) -> None:
        """The first process gets the whole embedding, a block at a time; others keep a shell."""
        self.load_best()
        del self.optimizer, self.best, self.gradients
        own, is_first = self.own.state_dict(), self.group.is_first
        if is_first:
            model.to_empty(device="cpu")
            model.no_bias.zero_()
            rest = {name: tensor for name, tensor in own.items() if name not in ROWS}
            model.load_state_dict(rest, strict=False)
        for name in ROWS:
            if name in own:
                target = model.get_parameter(name).detach() if is_first else None
                _collect(own[name], target, self.group)
        model.eval()

    def _copy(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.own.state_dict().items()}

    def _own_share(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Own rows under a name that says whose they are, and a share of what all have."""
        whose = f"@{self.group.rank}/{self.group.n}"
        own = {f"{k}{whose}": t for k, t in tensors.items() if _is_sharded(k) and t.ndim}
        rest = {k: t for k, t in tensors.items() if f"{k}{whose}" not in own}
        return own | share_of(rest, self.group)

    def _own_part(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this process needs of a checkpoint, whatever the processes that wrote it."""
        n, rank = self.group.n, self.group.rank
        part = {name: tensors[name] for name in tensors if "@" not in name}
        for name, tensor in part.items():
            if _is_sharded(name) and tensor.ndim:  # of a training that was not sharded
                part[name] = tensor[rank::n].clone()
        sharded = sorted({name.partition("@")[0] for name in tensors if "@" in name})
        for name in sharded:
            parts = {
                tuple(map(int, key.partition("@")[2].split("/"))): key
                for key in tensors
                if key.partition("@")[0] == name
            }
            if (rank, n) in parts:
                part[name] = tensors[parts[rank, n]]
                continue
            is_vector = name.endswith("output_bias")
            n_rows = self.n_items + (0 if is_vector else self.n_special)
            rows = torch.arange(rank, n_rows, n)
            for (owner, n_owners), key in parts.items():
                theirs = tensors[key]
                if name not in part:
                    part[name] = theirs.new_empty(len(rows), *theirs.shape[1:])
                is_here = rows % n_owners == owner
                part[name][is_here] = theirs[rows[is_here] // n_owners]
        return part


class _OwnShard(nn.Module):
    """The parameters that this process updates: its rows, and the rest of the model."""

    output_bias: nn.Parameter | None

    def __init__(
        self,
        small: SequenceModel,
        shards: ShardedRows,
        bias: Tensor,
        n_special: int,
        config: RunConfig,
    ) -> None:
        super().__init__()
        rank, n_items = shards.group.rank, len(bias)
        n_rows = n_items + n_special
        generator = torch.Generator().manual_seed(config.training.seed * 1_000_003 + rank)
        self.items = RowEmbedding(shards.n_own(n_rows), small.settings.dim, sparse=True)
        nn.init.trunc_normal_(self.items.weight, std=0.02, a=-0.04, b=0.04, generator=generator)
        if getattr(small.settings, "initialization", None) == "local":
            with torch.no_grad():
                clear_reserved(self.items.weight, small.settings.heads)
        rows = torch.arange(rank, n_rows, shards.group.n)
        is_special = rows >= n_items  # PAD and MASK start as in the small model
        with torch.no_grad():
            theirs = small.get_parameter("items.weight")[small.n_items :]
            self.items.weight[is_special] = theirs[rows[is_special] - n_items]
        self.n_items = shards.n_own(n_items)
        has_bias = hasattr(small, "output_bias")
        own_bias = bias[rank :: shards.group.n].clone()
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


def check_can_shard(config: RunConfig, n_processes: int) -> None:
    """Before any work is done: what cannot be sharded, and what to do instead."""
    training, loss = config.training, config.loss
    if n_processes == 1:
        raise ValueError(
            "training.shard_items shards the item embeddings over several processes, and there is "
            "one: start more, with --processes or torchrun"
        )
    if config.model.name not in SHARDABLE:
        raise ValueError(
            f"training.shard_items works for {' and '.join(SHARDABLE)}, not for {config.model.name}"
        )
    if loss.name == "cross-entropy":
        raise ValueError(
            "training.shard_items needs a loss that touches some items only, and cross-entropy "
            "touches all: add --set loss.name=sampled-softmax"
        )
    is_drawn = isinstance(loss, SampledSettings) and loss.negatives != "in-batch"
    if isinstance(loss, SampledSettings) and is_drawn and loss.n_negatives < SHARED_FROM:
        raise ValueError(
            f"training.shard_items and loss.n_negatives = {loss.n_negatives}: the "
            f"queries of a step share their negatives, so draw {SHARED_FROM} or more"
        )
    if training.device not in ("auto", "cpu"):
        raise ValueError("training.shard_items works on CPUs: leave training.device out")


def capacity_for(config: RunConfig, n_items: int, n_sequences: int) -> int:
    """The most items that a step of so many sequences, or a validation, can touch."""
    assert isinstance(config.model, SequenceModelSettings)
    n_negatives = config.loss.n_negatives if isinstance(config.loss, SampledSettings) else 0
    in_batch = n_sequences * (config.model.max_len + 1) + n_negatives
    in_answer = USERS_AT_ONCE * (config.model.max_len + 1)
    return min(n_items, max(in_batch, in_answer))


def _take_negatives(loss: Loss) -> _StepNegatives:
    """Put the negatives of a step in the place of those that the loss would draw."""
    if isinstance(loss, Sampled | InBatch):
        loss.negatives = negatives = _StepNegatives(loss.negatives)
        return negatives
    assert isinstance(loss, AmongTargets)
    loss.popularity = popularity = _StepNegatives(loss.popularity)
    return popularity


def _is_sharded(name: str) -> bool:
    return name.endswith(ROWS)


BLOCK = 1 << 16  # rows that travel at a time


def _collect(own: Tensor, target: Tensor | None, group: ProcessGroup) -> None:
    """Everybody's rows into the whole embedding of the first process."""
    n_rows = int(group.sum(len(own))[0])
    for first in range(0, -(-n_rows // group.n), BLOCK):
        part = own.new_zeros(BLOCK, *own.shape[1:])
        some = own[first : first + BLOCK]
        part[: len(some)] = some
        received = group.all_gather_tensor(part)
        if target is not None:
            for rank, block in enumerate(received):
                rows = torch.arange(rank, n_rows, group.n)[first : first + BLOCK]
                target[rows] = block[: len(rows)]


def _padded_rows(tensor: Tensor, n_rows: int, value: float) -> Tensor:
    padded = tensor.new_full((n_rows, *tensor.shape[1:]), value)
    padded[: len(tensor)] = tensor
    return padded
