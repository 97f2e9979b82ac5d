"""Hugging Face's BertForMaskedLM over items: logits of all items at all positions, as it gives."""

import torch
import transformers
from measure import Sequences, parse_arguments
from network import run
from transformers import BertConfig, BertForMaskedLM


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    sequences = Sequences(arguments.sequences)
    padding = sequences.n_items
    network = BertForMaskedLM(
        BertConfig(
            vocab_size=sequences.n_items + 2,
            hidden_size=arguments.dim,
            num_hidden_layers=arguments.layers,
            num_attention_heads=arguments.heads,
            intermediate_size=4 * arguments.dim,
            hidden_dropout_prob=arguments.dropout,
            attention_probs_dropout_prob=arguments.dropout,
            max_position_embeddings=arguments.max_len,
            type_vocab_size=1,
            pad_token_id=padding,
        )
    )

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return network(tokens, attention_mask=tokens != padding, labels=targets).loss

    def scores_of(tokens: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        logits = network(tokens, attention_mask=tokens != padding).logits
        return logits[torch.arange(len(tokens)), last]

    version = transformers.__version__
    run("huggingface", version, arguments, sequences, network, loss_of, scores_of)


if __name__ == "__main__":
    main()
