"""What all models have in common that the training loop trains.

Shapes: B batch, L length, D width, V items, M asked positions of a batch.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from bert4rec.config import ModelConfig
from bert4rec.data.pieces import FOR_TRAINING, Size
from bert4rec.models.coded_table import coded_tables
from bert4rec.models.histories import last_items
from bert4rec.models.onednn import without_onednn
from bert4rec.models.output import InBlocks, Output
from bert4rec.models.table import Table

TaskName = Literal["cloze", "next-item", "reconstruction"]


class Learned(nn.Module):
    """A model that turns places of a history into vectors, and vectors into scores of items.

    Training asks many places at once, and scoring the last one: both by `asked` and `output`.
    A stranger is user -1. A model with user vectors leaves the user's part out for strangers, or
    says that it `needs_known_user`.
    """

    task: ClassVar[TaskName]  # what it is trained on
    needs_known_user: ClassVar[bool] = False  # whether a history alone tells it nothing
    piece: ClassVar[Size] = FOR_TRAINING  # how much of a batch is computed at a time

    no_bias: Tensor  # (V,) zeros, for outputs that have none

    def __init__(self, n_items: int, config: ModelConfig, n_users: int = 0) -> None:
        super().__init__()
        self.n_items, self.n_users, self.max_len = n_items, n_users, config.max_len
        self.n_read: int | None = config.max_len
        self.pad = n_items
        self.register_buffer("no_bias", torch.zeros(n_items), persistent=False)

    def asked(self, tokens: Tensor, at: Tensor, users: Tensor) -> Tensor:
        """(B, L) tokens padded at the end, (M,) flat positions in row order, (B,) → (M, D).

        A model of the task `next-item` reads nothing behind an asked position.
        """
        raise NotImplementedError

    def asked_after(self, tokens: Tensor, at: Tensor, users: Tensor) -> Tensor:
        """The same for a `[MASK]` after each of the positions, of models that have one."""
        raise NotImplementedError

    def output(self) -> Output:
        raise NotImplementedError

    @without_onednn()
    @torch.inference_mode()
    def score(self, users: Tensor, history: Tensor) -> Tensor:
        """(B,), (B, L) histories, padded on either side → (B, V) scores of what comes next."""
        self._stop_training()
        device = next(self.parameters()).device
        tokens, at = self.question(history.to(device))
        return self.output().all_scores(self.asked(tokens, at, users.to(device)))

    def question(self, history: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens that are read of each history, and the flat position that is asked."""
        assert self.n_read is not None
        return last_items(history, pad=self.pad, n=self.n_read)

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], config: ModelConfig, n_items: int) -> Self:
        """The model of these tensors; its item vectors may be codes, and then stay codes."""
        n_users = len(tensors["users.weight"]) if "users.weight" in tensors else 0
        with torch.device("meta"):  # no numbers are made up only to be replaced
            model = cls(n_items, config, n_users)
        for name, table in coded_tables(tensors).items():
            whole = getattr(model, name, None)
            if not isinstance(whole, Table) or not table.replaces(n_items, whole.weight.shape):
                raise ValueError(
                    f"the compressed vectors {name!r} do not fit the {n_items:,} items of the "
                    "model: compress it again"
                )
            setattr(model, name, table)
        model.load_state_dict(tensors, assign=True)
        model.no_bias = torch.zeros(n_items)
        return model.eval()

    def prepare_item_vectors(self, vectors: Tensor) -> None:
        """Change item vectors that were drawn, (n, D), in place, to what the model starts with."""

    def start_with_bias(self, bias: Tensor) -> None:
        """(V,) where the bias of the items' scores starts, of models that have one."""
        mine = getattr(self, "output_bias", None)
        if mine is not None:
            with torch.no_grad():
                mine.copy_(bias)

    def item_tables(self) -> dict[str, Table]:
        """Every table with a row an item, by name."""
        tables = ((name, part) for name, part in self.named_children() if isinstance(part, Table))
        return {name: table for name, table in tables if name != "users"}

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self.state_dict().items()}

    def item_vectors(self) -> Tensor | None:
        """(V, D) vectors whose directions say which items are alike, of models that have such."""
        output = self.output()
        if not isinstance(output, InBlocks):
            return None
        return output.block(0, self.n_items)[0].detach()

    def _stop_training(self) -> None:
        """`eval()` for several threads: the parts come first, so that none sees it half done."""
        if self.training:
            for module in reversed(list(self.modules())):
                module.training = False


def known_users(table: nn.Embedding, users: Tensor) -> Tensor:
    """(B,) rows → (B, D) their vectors, and zeros for strangers: their part is left out."""
    vectors: Tensor = table(users.clamp(min=0))
    return vectors * (users >= 0)[:, None]


def initialise(module: nn.Module) -> None:
    """Truncated normal of 0.02 for weights, zero for biases, as in the paper of BERT4Rec."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
