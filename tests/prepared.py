"""What a prepared data set holds, in a form that tests compare."""

from pathlib import Path
from typing import Any

from bert4rec.data.sequences import Sequences


def decoded(sequences: Sequences) -> dict[Any, list[Any]]:
    """The raw items of every raw user."""
    return {
        user: [sequences.vocabulary.raw(token) for token in sequences[row]]
        for row, user in enumerate(sequences.user_ids)
    }


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}
