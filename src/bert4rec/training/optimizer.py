"""AdamW for everything, or Adam on the touched rows of large embeddings where the loss is sampled.

With a full softmax every item embedding has a gradient in every step. A sampled loss touches the
items of the batch and its negatives; updating a million others by a gradient of zero would cost
more than the rest of the step. `SparseAdam` leaves them and their moments alone until they occur,
and has no weight decay.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bert4rec.training.gradients import clip_gradient, dense_and_sparse

CLIP_NORM = 5.0  # largest norm of a gradient, as in the authors' code; larger ones are scaled down


class Optimizer:
    def __init__(self, model: nn.Module, weight_decay: float) -> None:
        self.parameters = dict(model.named_parameters())
        dense, rows = dense_and_sparse(model)
        # The paper's exclusions: no decay on biases and LayerNorm.
        groups = [
            {"params": [p for p in dense if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in dense if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, fused=True)]
        self.optimizer_of: dict[Tensor, torch.optim.Optimizer] = dict.fromkeys(dense, self.optimizers[0])
        if rows:
            self.optimizers.append(torch.optim.SparseAdam(rows))
            self.optimizer_of |= dict.fromkeys(rows, self.optimizers[1])

    def step(self, learning_rate: float, norm: float | None = None) -> None:
        """Clip the gradient, update the parameters and clear the gradient.

        `norm` is that of the whole gradient where other processes have parts of it.
        """
        clip_gradient(list(self.parameters.values()), CLIP_NORM, norm)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
        for parameter in self.parameters.values():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()  # kept, so that losses and embeddings can add to it in place

    def moments(self) -> list[Tensor]:
        """The optimizer's tensors, which it updates in place."""
        states = (state for each in self.optimizers for state in each.state.values())
        return [value for state in states for value in state.values() if isinstance(value, Tensor) and value.ndim]

    def tensors(self) -> dict[str, Tensor]:
        """The moments under the parameters' names."""
        return {
            f"{key}/{name}": torch.as_tensor(value)
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer_of[parameter].state.get(parameter, {}).items()
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        for key_and_name, value in tensors.items():
            key, _, name = key_and_name.partition("/")
            parameter = self.parameters[name]
            optimizer = self.optimizer_of[parameter]
            is_count = key == "step" and isinstance(optimizer, torch.optim.SparseAdam)
            optimizer.state[parameter][key] = int(value) if is_count else value.clone().to(parameter.device)
