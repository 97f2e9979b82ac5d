"""Train and score a network that is given as two functions of a batch: for the bare networks."""

import argparse
from collections.abc import Callable, Iterator

import torch
from batches import scoring_batches, training_batches
from measure import N_HISTORIES, THREADS, TOP, Sequences, Stopwatch, median_milliseconds, report

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of tokens and targets
Scores = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of tokens and the asked places


def train(arguments: argparse.Namespace, sequences: Sequences, network: torch.nn.Module, loss_of: Loss) -> Stopwatch:
    """An ordinary training loop with AdamW; every row of a batch is one sequence."""
    network.train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)

    def steps() -> Iterator[int]:
        shape = (arguments.max_len, arguments.mask_ratio, arguments.batch)
        for tokens, targets in training_batches(sequences, *shape):
            loss = loss_of(torch.from_numpy(tokens), torch.from_numpy(targets))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield len(tokens)

    stopwatch = Stopwatch(arguments.seconds)
    stopwatch.time(steps())
    return stopwatch


def top(scores_of: Scores, tokens, last, seen, n_items: int) -> torch.Tensor:
    scores = scores_of(tokens, last)[:, :n_items]
    scores[seen] = -torch.inf
    return scores.topk(TOP)


def score(arguments: argparse.Namespace, sequences: Sequences, scores_of: Scores) -> Stopwatch:
    def steps() -> Iterator[int]:
        for tokens, last, seen in scoring_batches(sequences, arguments.max_len, arguments.batch):
            places = map(torch.from_numpy, seen)
            tensors = torch.from_numpy(tokens), torch.from_numpy(last), tuple(places)
            top(scores_of, *tensors, sequences.n_items)
            yield len(tokens)

    stopwatch = Stopwatch(arguments.seconds)
    with torch.inference_mode():
        stopwatch.time(steps())
    return stopwatch


def one(arguments: argparse.Namespace, sequences: Sequences, scores_of: Scores) -> float:
    """Padded histories, from tensors."""
    batches = []
    for _, (tokens, last, seen) in zip(
        range(N_HISTORIES), scoring_batches(sequences, arguments.max_len, 1), strict=False
    ):
        places = tuple(map(torch.from_numpy, seen))
        batches.append((torch.from_numpy(tokens), torch.from_numpy(last), places))
    with torch.inference_mode():
        return median_milliseconds(lambda i: top(scores_of, *batches[i % N_HISTORIES], sequences.n_items))


def run(
    tool: str,
    version: str,
    arguments: argparse.Namespace,
    sequences: Sequences,
    network: torch.nn.Module,
    loss_of: Loss,
    scores_of: Scores,
) -> None:
    torch.set_num_threads(THREADS)
    answer = {"note": "rows padded to the full length; batches made in the same process"}
    if arguments.task == "train":
        answer["stopwatch"] = train(arguments, sequences, network, loss_of)
    elif arguments.task == "score":
        network.eval()
        answer["stopwatch"] = score(arguments, sequences, scores_of)
    else:
        network.eval()
        answer["p50_ms"] = one(arguments, sequences, scores_of)
        answer["note"] = "one history from tensors, without padding"
    report(tool, version, torch.__version__, arguments, **answer)
