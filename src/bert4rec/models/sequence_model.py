"""What all models have in common that the training loop trains.

Shapes: B batch, L length, D width, V items, M query positions of a batch.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from bert4rec.cpu_tuning import without_onednn
from bert4rec.data.splits import FOR_TRAINING, MicrobatchSize
from bert4rec.models.kernels.row_embedding import RowEmbedding
from bert4rec.models.output import DotProductOutput, Output
from bert4rec.models.quantized_embedding import quantized_embeddings
from bert4rec.settings import Dropout, Positive, Settings


class ModelSettings(Settings):
    name: str = Field(description="which model; `bert4rec models` lists them")


class SequenceModelSettings(ModelSettings):
    dim: Positive = Field(64, description="width of the item embeddings and of every layer")
    max_len: Annotated[int, Field(ge=2)] = Field(
        100, description="longest sequence in items, the [MASK] of BERT4Rec included; older items are ignored"
    )
    dropout: Dropout = Field(0.2, description="dropout of embeddings and hidden layers")


class SequenceModel(nn.Module):
    """Turns positions of a history into vectors, and vectors into scores of items.

    Training queries many positions at once, scoring the last one: both by `encode_queries` and
    `output`. An unknown user is row -1: a model with user embeddings leaves the user's part out,
    or says that it `needs_known_user`.
    """

    settings_class: ClassVar[type[Settings]]
    objectives: ClassVar[tuple[str, ...]]  # that can train it; the first is its own
    has_mask: ClassVar[bool] = False  # whether it has a [MASK] to query with
    needs_known_user: ClassVar[bool] = False  # whether a history alone says nothing to it
    microbatch: ClassVar[MicrobatchSize] = FOR_TRAINING  # how much is computed at a time

    no_bias: Tensor  # (V,) zeros, for outputs that have no bias

    def __init__(self, n_items: int, settings: Any, n_users: int = 0) -> None:
        super().__init__()
        self.settings, self.n_items, self.n_users = settings, n_items, n_users
        self.pad_token, self.max_len = n_items, settings.max_len
        self.max_history: int | None = settings.max_len  # items of a history that are read
        self.register_buffer("no_bias", torch.zeros(n_items), persistent=False)

    def encode_queries(self, tokens: Tensor, positions: Tensor, users: Tensor) -> Tensor:
        """(B, L) tokens padded at the end, (M,) flat query positions in row order, (B,) → (M, D).

        A model of the objective `next_item` reads nothing behind a query position.
        """
        raise NotImplementedError

    def encode_prefixes(self, tokens: Tensor, positions: Tensor, users: Tensor) -> Tensor:
        """The same for a `[MASK]` after each of the positions, of models that have one."""
        raise NotImplementedError

    def output_layer(self) -> Output:
        raise NotImplementedError

    @without_onednn()
    @torch.inference_mode()
    def encode(self, users: Tensor, histories: Tensor) -> Tensor:
        """(B,) user rows, (B, L) histories padded at the end → (B, D) what comes next.

        A history holds at most `max_history` items. Several threads may call it at once.
        """
        self.end_training()
        device = next(self.parameters()).device
        tokens, positions = self.next_item_query(histories.to(device))
        return self.encode_queries(tokens, positions, users.to(device))

    def next_item_query(self, histories: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens, and the flat query position of each row: that of its last item.

        A row without items holds padding and is queried at position 0.
        """
        n_rows, length = histories.shape
        if length == 0:
            histories, length = histories.new_full((n_rows, 1), self.pad_token), 1
        last = ((histories != self.pad_token).sum(1) - 1).clamp(min=0)
        return histories, torch.arange(n_rows, device=last.device) * length + last

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], settings: Any, n_items: int) -> Self:
        """The model of saved tensors; quantized item embeddings stay quantized."""
        n_users = len(tensors["users.weight"]) if "users.weight" in tensors else 0
        with torch.device("meta"):  # shapes only: the tensors take the place of the parameters
            model = cls(n_items, settings, n_users)
        for name, embedding in quantized_embeddings(tensors).items():
            plain = model.item_embeddings().get(name)
            if plain is None or not embedding.replaces(n_items, tuple(plain.weight.shape)):
                raise ValueError(f"the quantized {name} does not fit the model: its settings are of another one")
            setattr(model, name, embedding)
        model.load_state_dict(tensors, assign=True)
        model.no_bias = torch.zeros(n_items)
        return model.eval()

    def item_embeddings(self) -> dict[str, RowEmbedding]:
        """Every embedding with a row per item, by name."""
        parts = self.named_children()
        found = {name: part for name, part in parts if isinstance(part, RowEmbedding)}
        return {name: part for name, part in found.items() if name != "users"}

    def state(self) -> dict[str, Tensor]:
        """All that has to be saved to get the same model back."""
        return {name: tensor.detach() for name, tensor in self.state_dict().items()}

    def item_vectors(self) -> Tensor | None:
        """(V, D) vectors whose directions say which items are alike, of models that have such."""
        output = self.output_layer()
        if not isinstance(output, DotProductOutput):
            return None
        return output.block(0, self.n_items)[0].detach()

    def end_training(self) -> None:
        """`eval()` for several threads: the parts come first, so that none sees it half done."""
        if self.training:
            for module in reversed(list(self.modules())):
                module.training = False


def embed_users(users: Tensor, embedding: nn.Embedding) -> Tensor:
    """(B,) rows → (B, D) embeddings, zeros for unknown users."""
    vectors: Tensor = embedding(users.clamp(min=0))
    return vectors * (users >= 0)[:, None]
