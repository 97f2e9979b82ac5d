"""The gradient of a batch, accumulated over microbatches on all cores.

Each worker thread computes whole microbatches on its share of the cores. It has a copy of the model
that shares the weights with the original and has gradients of its own; at the end they are added to
those of the original. Which worker gets which microbatch follows from the sizes alone, so that a
run is bit-identical with the same numbers of workers and cores.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from bert4rec.losses import Loss, uses_sparse_gradient
from bert4rec.models.kernels.byte_dropout import ByteDropout
from bert4rec.models.kernels.row_embedding import RowEmbedding
from bert4rec.models.sequence_model import SequenceModel
from bert4rec.threads import WorkerThreads
from bert4rec.training.batches import Batch, Microbatch
from bert4rec.training.hardware import Hardware
from bert4rec.training.process_group import ProcessGroup

Thing = TypeVar("Thing")

LARGE = 2**18  # numbers; a copy of fewer costs less than another message
CPU = Hardware(torch.device("cpu"), uses_bf16=False)


class Gradients:
    """Adds the gradient of a batch to that of a model, on several worker threads."""

    def __init__(
        self, model: SequenceModel, loss: Loss, workers: WorkerThreads, hardware: Hardware = CPU, *, rank: int = 0
    ) -> None:
        self.loss, self.workers, self.hardware, self.rank = loss, workers, hardware, rank
        for table in _tables(model):
            table.sparse = loss.is_sparse and uses_sparse_gradient(table.num_embeddings)
        self.model = model
        self.models = [model, *(_sharing_weights(model) for _ in range(workers.n - 1))]
        # Losses and embeddings add to these gradients in place, in the first step after a resume as in all others.
        for each in self.models:
            added_to = [table.weight for table in _tables(each) if not table.sparse]
            added_to += [parameter for name, parameter in each.named_parameters() if name == "output_bias"]
            for parameter in added_to:
                parameter.grad = torch.zeros_like(parameter)
        self.dropouts = [
            [module for module in each.modules() if isinstance(module, ByteDropout)] for each in self.models
        ]

    def add(self, batch: Batch, seed: int, scale: float | None = None) -> float:
        """Add the gradient of the mean loss of `batch` to the model's; returns that loss.

        `scale` is 1 / the number of queries, unless other processes have a part of the batch.
        """
        scale = 1 / batch.n_queries if scale is None else scale
        n_items = self.model.n_items
        shares = fair_shares(batch.microbatches, lambda each: cost_of(each, n_items), self.workers.n)

        def work(worker: int) -> float:
            return self._work(worker, shares[worker], scale, seed)

        with self.hardware.computing():
            losses = self.workers.map(work, range(len(shares)))
        for model in self.models[1:]:
            for ours, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
                _move_gradient(theirs, ours)
        return sum(losses)

    def _work(self, worker: int, microbatches: list[Microbatch], scale: float, seed: int) -> float:
        model, device = self.models[worker], self.hardware.device
        seeds = np.random.SeedSequence([seed, worker, self.rank])
        for_dropout, for_loss = seeds.generate_state(2).tolist()
        masks = torch.Generator(device).manual_seed(for_dropout)
        negatives = torch.Generator().manual_seed(for_loss)
        for dropout in self.dropouts[worker]:
            dropout.reuse_masks(masks)
        try:
            return sum(self._add_microbatch(model, each, scale, negatives) for each in microbatches)
        finally:
            for dropout in self.dropouts[worker]:
                dropout.reuse_masks(None)

    def _add_microbatch(
        self, model: SequenceModel, microbatch: Microbatch, scale: float, negatives: torch.Generator
    ) -> float:
        device = self.hardware.device
        tokens, positions, users, targets = (x.to(device) for x in microbatch[:4])
        with self.hardware.autocast():
            encode = model.encode_prefixes if microbatch.inserts_masks else model.encode_queries
            h = encode(tokens, positions, users).float()
        loss, grad_h = self.loss(h.detach(), model.output_layer(), targets, scale=scale, generator=negatives)
        h.backward(grad_h)  # type: ignore[no-untyped-call]
        return float(loss)


def _tables(model: nn.Module) -> list[RowEmbedding]:
    return [module for module in model.modules() if isinstance(module, RowEmbedding)]


def dense_and_sparse(model: nn.Module) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Its parameters, by the kind of their gradients."""
    sparse = [table.weight for table in _tables(model) if table.sparse]
    return [p for p in model.parameters() if not any(p is table for table in sparse)], sparse


def fair_shares(things: Iterable[Thing], cost: Callable[[Thing], float], n: int) -> list[list[Thing]]:
    """All things in `n` lists that cost about the same: the largest first, each to the list that costs least."""
    shares: list[list[Thing]] = [[] for _ in range(n)]
    costs = [0.0] * n
    for each in sorted(things, key=cost, reverse=True):
        cheapest = costs.index(min(costs))
        shares[cheapest].append(each)
        costs[cheapest] += cost(each)
    return shares


def cost_of(microbatch: Microbatch, n_items: int) -> float:
    """About how long it takes; in microseconds at width 64, but only the ratios matter."""
    length, n_queries = microbatch.tokens.shape[1], len(microbatch.positions)
    per_position = 8 + 0.02 * length
    return 1000 + microbatch.tokens.numel() * per_position + n_queries * (8 + n_items / 180)


def _sharing_weights(model: SequenceModel) -> SequenceModel:
    """A copy whose parameters are the same memory, with gradients of their own."""
    memo = {id(each): nn.Parameter(each.detach()) for each in model.parameters()}
    return copy.deepcopy(model, memo)


def _move_gradient(source: nn.Parameter, to: nn.Parameter) -> None:
    """Add one parameter's gradient to another's, and clear the first."""
    if source.grad is None:
        return
    if to.grad is None:
        to.grad = source.grad.clone()
    elif to.grad.is_sparse:
        to.grad = to.grad + source.grad
    else:
        to.grad += source.grad
    if source.grad.is_sparse:
        source.grad = None
    else:
        source.grad.zero_()


def clip_gradient(parameters: list[nn.Parameter], max_norm: float, norm: float | None = None) -> Tensor:
    """Scale the gradient down to `max_norm`, sparse ones included; returns the norm it had.

    `norm` is that of the whole gradient where these parameters have a part of it only.
    """
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
    values = [
        parameter.grad.values() if parameter.grad.is_sparse else parameter.grad
        for parameter in parameters
        if parameter.grad is not None
    ]
    found: Tensor = torch.stack([each.norm() for each in values]).norm()
    if norm is not None:
        found = found.new_tensor(norm)
    if bool(found > max_norm):
        for each in values:
            each.mul_(max_norm / found)
    return found


def average_gradients(
    model: nn.Module, group: ProcessGroup, n_queries: float, loss: float, signals: Sequence[float]
) -> tuple[float, list[float]]:
    """Everybody's gradients into everybody's model, as a mean over all queries.

    The loss and the signals travel along with them: returns the mean of the losses and the sums of
    the signals. Small gradients go together in one tensor, large ones in their own place, and of an
    embedding of which a step touches few rows, those rows only.

    torch's DistributedDataParallel hooks into autograd's backward pass; ours adds gradients up on
    several threads, and the largest of them, the output layer's, outside of autograd. So this is
    done after it instead.
    """
    if group.n == 1:
        return loss, list(signals)
    dense, tables = dense_and_sparse(model)
    small = [p for p in dense if p.numel() < LARGE]
    large = [p for p in dense if p.numel() >= LARGE]
    # Behind the gradients: who has any, of how many queries, the loss and the signals.
    has_gradient = [float(p.grad is not None) for p in small + large]
    tail = torch.tensor([*has_gradient, n_queries, loss, *signals], device=next(model.parameters()).device)
    together = group.all_reduce(torch.cat([*(_gradient(p).flatten() for p in small), tail]))
    *parts, tail = torch.split(together, [*(p.numel() for p in small), len(tail)])
    *n_having, n_all, loss = tail[: len(dense) + 2].tolist()
    share = 1 / n_all
    for parameter in large:
        parameter.grad = group.all_reduce(_gradient(parameter)).mul_(share)
    for parameter, part in zip(small, parts, strict=True):
        parameter.grad = torch.mul(part.view_as(parameter), share, out=_gradient(parameter))
    for parameter, n in zip(small + large, n_having, strict=True):
        if not n:
            parameter.grad = None  # as alone: nobody's batch needed it
    for table in tables:
        table.grad = _rows_of_all(table, share, group)
    return loss * share, tail[len(dense) + 2 :].tolist()


def _rows_of_all(weight: Tensor, share: float, group: ProcessGroup) -> Tensor:
    """The touched rows of all processes, as one sparse gradient."""
    indices = torch.zeros(0, dtype=torch.int64, device=weight.device)
    values = weight.new_zeros(0, weight.shape[1])
    if weight.grad is not None:
        own = weight.grad.coalesce()
        indices, values = own.indices()[0], own.values() * share
    counts = [int(n) for n in group.all_gather(len(indices))]
    parts = []
    for part in (indices, values):
        padded = part.new_zeros(max(counts), *part.shape[1:])
        padded[: len(part)] = part
        received = group.all_gather_tensor(padded)
        parts.append(torch.cat([r[:n] for r, n in zip(received, counts, strict=True)]))
    return torch.sparse_coo_tensor(parts[0][None], parts[1], tuple(weight.shape), check_invariants=False)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
