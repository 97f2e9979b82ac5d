"""The all-reduce of gradients: every process makes the same step.

Small gradients travel together in one tensor, large ones in their own place. Of an embedding of
which a step touches few rows, those rows travel and nothing else.

torch's DistributedDataParallel hooks into autograd's backward pass. Ours adds gradients up on
several threads and the largest of them, the output layer's, outside of autograd, so this is done
after it instead.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bert4rec.models.kernels.row_embedding import RowEmbedding
from bert4rec.training.process_group import ProcessGroup, StepSignals

LARGE = 2**18  # numbers; a copy of fewer costs less than another message


class GradientAllReduce:
    def __init__(self, model: nn.Module, group: ProcessGroup) -> None:
        self.group = group
        tables = [m for m in model.modules() if isinstance(m, RowEmbedding) and m.sparse]
        self.rows = [table.weight for table in tables]
        dense = [p for p in model.parameters() if not any(p is row for row in self.rows)]
        self.small = [p for p in dense if p.numel() < LARGE]
        self.large = [p for p in dense if p.numel() >= LARGE]
        n_small = sum(p.numel() for p in self.small)
        # Behind the gradients: who has any, of how many queries, the loss and the signals.
        device = next(model.parameters()).device
        self.together = torch.zeros(
            n_small + len(dense) + 2 + len(StepSignals._fields), device=device
        )

    def reduce(
        self, n_queries: float, loss: float, signals: StepSignals
    ) -> tuple[float, StepSignals]:
        parameters = self.small + self.large
        has_gradient = [float(p.grad is not None) for p in parameters]
        gradients = [_gradient(p).flatten() for p in self.small]
        tail = torch.tensor([*has_gradient, n_queries, loss, *signals], device=self.together.device)
        torch.cat([*gradients, tail], out=self.together)
        self.group.all_reduce(self.together)
        *counts, n_all, loss, stop, save, n_sequences = self.together[-len(tail) :].tolist()
        share = 1 / n_all
        for parameter in self.large:
            parameter.grad = self.group.all_reduce(_gradient(parameter)).mul_(share)
        first = 0
        for parameter in self.small:
            part = self.together[first : first + parameter.numel()]
            place = _gradient(parameter)
            parameter.grad = torch.mul(part.view_as(parameter), share, out=place)
            first += parameter.numel()
        for parameter, n_having in zip(parameters, counts, strict=True):
            if not n_having:
                parameter.grad = None  # as alone: nobody's batch needed it
        for weight in self.rows:
            weight.grad = self._rows_of_all(weight, share)
        return loss * share, StepSignals(stop, save, n_sequences)

    def _rows_of_all(self, weight: Tensor, share: float) -> Tensor:
        """The touched rows of all processes, as one sparse gradient."""
        width, device = weight.shape[1], weight.device
        indices = torch.zeros(0, dtype=torch.int64, device=device)
        values = torch.zeros(0, width, device=device)
        if weight.grad is not None:
            own = weight.grad.coalesce()
            indices, values = own.indices()[0], own.values() * share
        counts = [int(n) for n in self.group.all_gather(len(indices))]
        parts = []
        for part in (indices, values):
            padded = part.new_zeros(max(counts), *part.shape[1:])
            padded[: len(part)] = part
            received = self.group.all_gather_tensor(padded)
            parts.append(torch.cat([r[:n] for r, n in zip(received, counts, strict=True)]))
        return torch.sparse_coo_tensor(
            parts[0][None], parts[1], tuple(weight.shape), check_invariants=False
        )


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
