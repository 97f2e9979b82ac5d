"""The gradient of a batch, accumulated over microbatches on all cores.

Each worker thread computes whole microbatches on its share of the cores. It has a copy of the model
that shares the weights with the original and has gradients of its own; at the end they are added to
those of the original. Which worker gets which microbatch follows from the sizes alone, so that a
run is bit-identical with the same numbers of workers and cores.
"""

from __future__ import annotations

import copy

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
        # From the first step on losses and embeddings add to these gradients in place.
        for each in self.models:
            for table in _tables(each):
                if not table.sparse:
                    table.weight.grad = torch.zeros_like(table.weight)
        self.dropouts = [
            [module for module in each.modules() if isinstance(module, ByteDropout)] for each in self.models
        ]

    def add(self, batch: Batch, seed: int, scale: float | None = None) -> float:
        """Add the gradient of the mean loss of `batch` to the model's; returns that loss.

        `scale` is 1 / the number of queries, unless other processes have a part of the batch.
        """
        scale = 1 / batch.n_queries if scale is None else scale
        shares = distribute(batch.microbatches, self.workers.n, self.models[0].n_items)

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
            encode = model.encode_prefixes if microbatch.appends_mask else model.encode_queries
            h = encode(tokens, positions, users).float()
        loss, grad_h = self.loss(h.detach(), model.output(), targets, scale=scale, generator=negatives)
        h.backward(grad_h)  # type: ignore[no-untyped-call]
        return float(loss)


def _tables(model: SequenceModel) -> list[RowEmbedding]:
    return [module for module in model.modules() if isinstance(module, RowEmbedding)]


def distribute(microbatches: list[Microbatch], n: int, n_items: int) -> list[list[Microbatch]]:
    """Microbatches for `n` workers: the largest first, each to the worker with the least work."""
    costs = {id(each): _cost(each, n_items) for each in microbatches}
    shares: list[list[Microbatch]] = [[] for _ in range(n)]
    busy = [0.0] * n
    for each in sorted(microbatches, key=lambda each: -costs[id(each)]):
        idlest = busy.index(min(busy))
        shares[idlest].append(each)
        busy[idlest] += costs[id(each)]
    return shares


def _cost(microbatch: Microbatch, n_items: int) -> float:
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
