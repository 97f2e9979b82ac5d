"""The obvious BERT4Rec: torch's nn.TransformerEncoder on padded rows, logits of all items at all
positions, of which the wanted ones are taken."""

import torch
from measure import Sequences, parse_arguments
from network import run
from torch import nn


class Plain(nn.Module):
    def __init__(self, arguments, n_items: int) -> None:
        super().__init__()
        self.padding = n_items
        self.items = nn.Embedding(n_items + 2, arguments.dim)
        self.positions = nn.Embedding(arguments.max_len, arguments.dim)
        self.norm = nn.LayerNorm(arguments.dim)
        self.dropout = nn.Dropout(arguments.dropout)
        self.bias = nn.Parameter(torch.zeros(n_items + 2))
        layer = nn.TransformerEncoderLayer(
            arguments.dim, arguments.heads, 4 * arguments.dim, arguments.dropout, "gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, arguments.layers)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.items(tokens) + self.positions.weight[: tokens.shape[1]]
        padded = tokens == self.padding
        return self.encoder(self.dropout(self.norm(hidden)), src_key_padding_mask=padded)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.items.weight, self.bias)


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    sequences = Sequences(arguments.sequences)
    network = Plain(arguments, sequences.n_items)

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = network.logits(network.hidden(tokens))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def scores_of(tokens: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        logits = network.logits(network.hidden(tokens))
        return logits[torch.arange(len(tokens)), last]

    run("plain", torch.__version__, arguments, sequences, network, loss_of, scores_of)


if __name__ == "__main__":
    main()
