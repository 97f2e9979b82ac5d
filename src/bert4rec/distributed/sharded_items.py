"""Item embeddings too large for one machine: each process keeps a shard of the rows.

A step needs the embeddings of its own batch and of its negatives only. They are fetched from their
owners into a small model that knows just these items, the step is computed with it as ever, and
their gradients go back to the owners, who keep the optimizer's moments and update the rows.
Everything else is small and the same in every process.

For sampled losses: a softmax over all items would need all embeddings in every step. All queries of
a process share one draw of negatives per step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bert4rec.config import RunConfig
from bert4rec.data.splits import HeldOut, Spans
from bert4rec.distributed.shard_parameters import RowRequest, ShardParameters
from bert4rec.item_mask import ItemMask
from bert4rec.losses import Loss
from bert4rec.losses.negatives import Negatives
from bert4rec.losses.sampled import SHARED_FROM, AmongTargets, Sampled, SampledSettings
from bert4rec.models.kernels.row_embedding import RowEmbedding
from bert4rec.models.sequence_model import SequenceModel, SequenceModelSettings
from bert4rec.scoring import UNREACHABLE
from bert4rec.threads import WorkerThreads
from bert4rec.training.batches import Batch
from bert4rec.training.checkpoint import TrainingTensors
from bert4rec.training.gradients import average_gradients
from bert4rec.training.hardware import Hardware
from bert4rec.training.process_group import ProcessGroup
from bert4rec.training.replica import Replica
from bert4rec.training.setup import build_model

USERS_AT_ONCE = 256  # held-out users that a process encodes at a time
SCORES_AT_ONCE = 1 << 24  # that are held, of all processes' users
SHARDABLE = ("bert4rec", "sasrec")  # one item embedding, which is also the output


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


class ShardedItems(Replica):
    """A replica of a model of as many items as `bias`, the initial output bias, has entries.

    The small model holds as many of them at a time as its capacity allows.
    """

    own: ShardParameters

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
        own = ShardParameters(small, group, bias, config.training.seed)
        self.config = config
        self.n_items, self.capacity, self.rest = len(bias), small.n_items, own.rest
        self.n_negatives = loss.n_negatives if isinstance(loss, Sampled) else 0
        self.negatives = _take_negatives(loss)
        super().__init__(small, loss, config.training.weight_decay, workers, hardware, group, own=own)
        table = small.get_submodule("item_embedding")
        assert isinstance(table, RowEmbedding)
        self.table = table
        self.special = torch.arange(self.n_items, self.n_items + len(table.weight) - self.capacity)  # PAD, MASK

    def step(self, batch: Batch, seed: int, rate: float, signals: Sequence[float]) -> tuple[float, list[float]]:
        self.model.train()
        (n_queries,) = self.group.sum(batch.n_queries)
        random = np.random.SeedSequence([seed, self.group.rank, 1]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(random >> 1))
        drawn = self.negatives.all_items.draw((1, self.n_negatives), generator)[0]
        tokens = [x for each in batch.microbatches for x in (each.tokens.flatten(), each.targets)]
        items = self._fill(torch.cat([*tokens, drawn]))
        self.negatives.set(items, torch.searchsorted(items, drawn))
        local = [
            each._replace(tokens=self._local(items, each.tokens), targets=self._local(items, each.targets))
            for each in batch.microbatches
        ]
        loss = self.gradients.add(Batch(local), seed, scale=1 / n_queries)
        self._send_gradients(len(items))
        # The loss and its gradients are parts of the mean already: all count as one query.
        loss, totals = average_gradients(self.rest, self.group, 1 / self.group.n, loss, signals)
        self.optimizer.step(rate, self._gradient_norm())
        return loss, totals

    def _fill(self, tokens: Tensor) -> Tensor:
        """Fetch the embeddings of these tokens into the small model; returns its items, sorted."""
        unique: Tensor = torch.unique(tokens)
        items = unique[unique < self.n_items]
        assert len(items) <= self.capacity
        self.request = RowRequest(torch.cat([items, self.special]), self.group)
        vectors = self.request.fetch(self.own.item_embedding.weight)
        with torch.no_grad():
            self.table.weight[: len(items)] = vectors[: len(items)]
            self.table.weight[self.capacity :] = vectors[len(items) :]
        if self.own.output_bias is not None:
            self.bias_request = RowRequest(items, self.group)
            with torch.no_grad():
                self.model.get_parameter("output_bias")[: len(items)] = self.bias_request.fetch(self.own.output_bias)
        return items

    def _local(self, items: Tensor, tokens: Tensor) -> Tensor:
        """Tokens of the whole catalogue by the numbers of the small model."""
        local = torch.searchsorted(items, tokens)
        result: Tensor = torch.where(tokens < self.n_items, local, tokens - self.n_items + self.capacity)
        return result

    def _send_gradients(self, n: int) -> None:
        """Those of the small model's `n` items to their owners; its own are cleared."""
        table, own = self.table.weight, self.own
        grad = torch.zeros_like(table) if table.grad is None else table.grad.to_dense()
        received = self.request.send_back(torch.cat([grad[:n], grad[self.capacity :]]))
        place, shape = self.request.theirs[None], tuple(own.item_embedding.weight.shape)
        own.item_embedding.weight.grad = torch.sparse_coo_tensor(place, received, shape, check_invariants=False)
        if table.grad is not None and not table.grad.is_sparse:
            table.grad.zero_()
        else:
            table.grad = None
        if own.output_bias is not None:
            bias = self.model.get_parameter("output_bias")
            grad = torch.zeros_like(bias) if bias.grad is None else bias.grad
            received = self.bias_request.send_back(grad[:n])
            own.output_bias.grad = torch.zeros_like(own.output_bias).index_add_(0, self.bias_request.theirs, received)
            if bias.grad is not None:
                bias.grad.zero_()  # kept, as in a run that was not interrupted

    def _gradient_norm(self) -> float:
        """The same number in every process: the rows of all, and the rest of one."""
        rows = self.own.item_embedding.weight.grad
        assert rows is not None
        self.own.item_embedding.weight.grad = rows = rows.coalesce()
        square = float(rows.values().double().square().sum())
        if self.own.output_bias is not None and self.own.output_bias.grad is not None:
            square += float(self.own.output_bias.grad.double().square().sum())
        gradients = [p.grad for p in self.rest.parameters() if p.grad is not None]
        rest = sum(float(grad.double().square().sum()) for grad in gradients)
        return float((self.group.sum(square)[0] + rest) ** 0.5)

    @torch.inference_mode()
    def held_out_ranks(self, held_out: HeldOut, *, exclude_seen: bool) -> Tensor:
        """Each process encodes its share of the histories, and scores its own items for those of all."""
        self.model.eval()
        n, ranks = self.group.n, torch.zeros(len(held_out), dtype=torch.int64)
        for first in range(0, len(held_out), n * USERS_AT_ONCE):
            rows = np.arange(first, min(first + n * USERS_AT_ONCE, len(held_out)))
            histories, targets = held_out.histories.take(rows), torch.from_numpy(held_out.targets[rows])
            mine = np.arange(self.group.rank, len(rows), n)
            encoded = self._encode(histories.take(mine), targets[mine])
            h, wanted = (self._of_all(each, len(rows)) for each in encoded)
            seen = torch.from_numpy(histories.padded(np.arange(len(rows)), self.n_items))
            hidden = seen if exclude_seen else seen[:, :0]
            n_before = self._count_before(h, wanted, targets, hidden)
            ranks[rows] = (1 + n_before).masked_fill((hidden == targets[:, None]).any(1), UNREACHABLE)
        return ranks

    def _of_all(self, mine: Tensor, n_rows: int) -> Tensor:
        """Every n-th row of all processes → all `n_rows` of them."""
        padded = mine.new_zeros(-(-n_rows // self.group.n), *mine.shape[1:])
        padded[: len(mine)] = mine
        return torch.stack(self.group.all_gather_tensor(padded), 1).flatten(0, 1)[:n_rows]

    def _encode(self, histories: Spans, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(B, D) the vectors of the histories, and (B,) the scores of the targets."""
        assert self.model.max_history is not None
        read = histories.last(self.model.max_history)
        padded = torch.from_numpy(read.padded(np.arange(len(read)), self.n_items))
        items = self._fill(torch.cat([padded.flatten(), targets]))
        if not len(read):
            return self.table.weight.new_zeros(0, self.table.embedding_dim), targets.float()
        h = self.model.encode(torch.from_numpy(read.users), self._local(items, padded))
        local = self._local(items, targets)[:, None]
        return h, self.model.output_layer().scores(h, local)[:, 0]

    def _count_before(self, h: Tensor, wanted: Tensor, targets: Tensor, hidden: Tensor) -> Tensor:
        """How many items rank before each target: (B, D), (B,) scores, (B,), (B, L) hidden → (B,).

        Every process counts its own items. Ties come before the target, as everywhere; the target
        itself and hidden items do not count.
        """
        n, rank = self.group.n, self.group.rank
        weight, bias = self.own.output_layer()
        left_out = torch.cat([hidden, targets[:, None]], 1)
        users, places = ((left_out < self.n_items) & (left_out % n == rank)).nonzero(as_tuple=True)
        mask = ItemMask(len(weight), users * len(weight) + left_out[users, places] // n)
        n_before = torch.zeros(len(h), dtype=torch.int64)
        step = max(1, SCORES_AT_ONCE // len(h))
        for first in range(0, len(weight), step):
            some = slice(first, first + step)
            scores = torch.addmm(bias[some], h, weight[some].T)
            mask.hide(scores, first)
            n_before += (scores >= wanted[:, None]).sum(1)
        return self.group.all_reduce(n_before)

    def tensors(self) -> TrainingTensors:
        self.group.synchronize(self.rest.parameters())
        parts = self.own.state_dict(), self.optimizer.tensors(), self.best
        return TrainingTensors(*map(self.own.to_checkpoint, parts))

    def restore(self, tensors: TrainingTensors) -> None:
        self.own.load_state_dict(self.own.from_checkpoint(tensors.weights))
        self.optimizer.restore(self.own.from_checkpoint(tensors.optimizer))
        self.best = self.own.from_checkpoint(tensors.best)

    def finish(self) -> SequenceModel:
        """The first process gets the whole model; that of the others has no weights."""
        self.load_best()
        del self.optimizer, self.best, self.gradients  # their memory is needed for it
        with torch.device("meta"):
            model = build_model(self.config, self.n_items, n_users=0)
        self.own.assemble(model)
        return model.eval()


def check_can_shard(config: RunConfig, n_processes: int, keep_stages: bool = False) -> None:
    """Before any work is done: what cannot be sharded, and what to do instead."""
    training, loss = config.training, config.loss
    if n_processes == 1:
        raise ValueError(
            "training.shard_items shards the item embeddings over several processes, and there is "
            "one: start more, with --processes or torchrun"
        )
    if config.model.name not in SHARDABLE:
        raise ValueError(f"training.shard_items works for {' and '.join(SHARDABLE)}, not for {config.model.name}")
    if loss.name == "cross-entropy":
        raise ValueError(
            "training.shard_items needs a loss that touches some items only, and cross-entropy "
            "touches all: add --set loss.name=sampled-softmax"
        )
    if keep_stages:
        raise ValueError("--keep-stages does not go with training.shard_items: no process has the whole model")
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
    in_step = n_sequences * (config.model.max_len + 1) + n_negatives
    in_validation = USERS_AT_ONCE * (config.model.max_len + 1)
    return min(n_items, max(in_step, in_validation))


def _take_negatives(loss: Loss) -> _StepNegatives:
    """Put the negatives of a step in the place of those that the loss would draw."""
    assert isinstance(loss, Sampled | AmongTargets)
    loss.negatives = negatives = _StepNegatives(loss.negatives)
    return negatives
