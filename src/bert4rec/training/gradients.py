"""The gradient of a batch, added up piece by piece on all cores.

Each worker thread computes whole pieces on its share of the cores. It has a copy of the model that
shares the weights with the original and adds up gradients of its own; at the end they are added to
those of the first. Which worker gets which piece follows from the sizes alone, so that a run can be
repeated to the last bit with the same numbers of workers and cores.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn

from bert4rec.models.layers import ByteDropout, FeedForward
from bert4rec.models.learned import Learned
from bert4rec.models.table import Table
from bert4rec.parallel import Workers
from bert4rec.training.batches import Batch, Piece
from bert4rec.training.hardware import Hardware
from bert4rec.training.losses import Loss, leaves_most_alone

CPU = Hardware(torch.device("cpu"), uses_bf16=False)


class Gradients:
    def __init__(
        self,
        model: Learned,
        loss: Loss,
        workers: Workers,
        hardware: Hardware = CPU,
        *,
        compiles: bool = False,
        rank: int = 0,
    ) -> None:
        self.loss, self.workers, self.hardware, self.rank = loss, workers, hardware, rank
        for table in _tables(model):
            table.sparse = loss.is_sparse and leaves_most_alone(table.num_embeddings)
        self.model = model
        self.models = [model, *(_sharing_weights(model) for _ in range(workers.n - 1))]
        if compiles:  # copies only: the model itself stays as it is, to be scored and saved
            self.models[0] = _sharing_weights(model)
            for each in self.models:
                for module in each.modules():
                    if isinstance(module, FeedForward):
                        module.compile(dynamic=True)
        # Gradients that are added to in place, from the first step on.
        for each in {model, *self.models}:
            for table in _tables(each):
                if not table.sparse:
                    table.weight.grad = torch.zeros_like(table.weight)
        self.dropouts = [
            [module for module in each.modules() if isinstance(module, ByteDropout)]
            for each in self.models
        ]

    def add(self, batch: Batch, seed: int, share: float | None = None) -> float:
        """Add the gradient of the mean loss of `batch` to the model's; returns that loss.

        `share` is one over all that is asked, where other processes have a part of the batch.
        """
        share = 1 / batch.n_asked if share is None else share
        shares = share_out(batch.pieces, self.workers.n, self.models[0].n_items)

        def work(worker: int) -> float:
            return self._work(worker, shares[worker], share, seed)

        with self.hardware.computing():
            losses = self.workers.map(work, range(len(shares)))
        for model in self.models:
            if model is not self.model:
                for ours, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
                    _move_gradient(theirs, ours)
        return sum(losses)

    def _work(self, worker: int, pieces: list[Piece], share: float, seed: int) -> float:
        model, device = self.models[worker], self.hardware.device
        place = [seed, worker, self.rank]
        for_dropout, for_loss = np.random.SeedSequence(place).generate_state(2).tolist()
        masks = torch.Generator(device).manual_seed(for_dropout)
        negatives = torch.Generator().manual_seed(for_loss)
        for dropout in self.dropouts[worker]:
            dropout.reuse_masks(masks)
        try:
            return sum(self._piece(model, piece, share, negatives) for piece in pieces)
        finally:
            for dropout in self.dropouts[worker]:
                dropout.reuse_masks(None)

    def _piece(
        self, model: Learned, piece: Piece, share: float, negatives: torch.Generator
    ) -> float:
        device = self.hardware.device
        tokens, at, users, targets = (x.to(device) for x in piece[:4])
        with self.hardware.autocast():
            ask = model.asked_after if piece.is_after else model.asked
            h = ask(tokens, at, users).float()
        loss, grad_h = self.loss(
            h.detach(), model.output(), targets, share=share, generator=negatives
        )
        h.backward(grad_h)  # type: ignore[no-untyped-call]
        return float(loss)


def _tables(model: Learned) -> list[Table]:
    return [module for module in model.modules() if isinstance(module, Table)]


def share_out(pieces: list[Piece], n: int, n_items: int) -> list[list[Piece]]:
    """Pieces for `n` workers, each piece to the one that has the least to do, largest first."""
    costs = {id(piece): _cost(piece, n_items) for piece in pieces}
    shares: list[list[Piece]] = [[] for _ in range(n)]
    busy = [0.0] * n
    for piece in sorted(pieces, key=lambda piece: -costs[id(piece)]):
        idlest = busy.index(min(busy))
        shares[idlest].append(piece)
        busy[idlest] += costs[id(piece)]
    return shares


def _cost(piece: Piece, n_items: int) -> float:
    """About how long a piece takes; in microseconds at width 64, but only the ratios matter."""
    length = piece.tokens.shape[1]
    return 1000 + piece.tokens.numel() * (8 + 0.02 * length) + len(piece.at) * (8 + n_items / 180)


def _sharing_weights(model: Learned) -> Learned:
    """A copy whose parameters are the same memory, with gradients of their own."""
    memo = {id(each): nn.Parameter(each.detach()) for each in model.parameters()}
    return copy.deepcopy(model, memo)


def _move_gradient(source: nn.Parameter, to: nn.Parameter) -> None:
    """Add one parameter's gradient to another's, and start again from nothing."""
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


def clip_gradient(
    parameters: list[nn.Parameter], longest: float, length: float | None = None
) -> Tensor:
    """Scale the gradient down to `longest`; returns how long it was. Sparse ones count as well.

    Its `length` is given where these are a part of it only.
    """
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
    values = [
        parameter.grad.values() if parameter.grad.is_sparse else parameter.grad
        for parameter in parameters
        if parameter.grad is not None
    ]
    norm: Tensor = torch.stack([each.norm() for each in values]).norm()
    if length is not None:
        norm = norm.new_tensor(length)
    if bool(norm > longest):
        for each in values:
            each.mul_(longest / norm)
    return norm
