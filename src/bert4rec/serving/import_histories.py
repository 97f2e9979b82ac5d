"""Histories of a prepared data set into a store, so that a service knows its users from the start.

An event's id follows from its content, so that importing the same table again adds nothing, and a
longer one adds what is new.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from hashlib import blake2b

from bert4rec.data.sequences import Sequences
from bert4rec.serving.store import KEPT, Added, Event, Store

BATCH = 5000  # events in one add: quick, and a service on the same store waits little for it
MICROSECONDS = 1_000_000


async def import_histories(
    store: Store,
    sequences: Sequences,
    on_progress: Callable[[int, int | None], None] | None = None,
) -> Added:
    """The newest `KEPT` events of each user, as many as a history shows."""
    n_total = int(sequences.lengths.clip(max=KEPT).sum())
    n_stored = n_duplicates = 0
    batch: list[Event] = []
    for row in range(sequences.n_users):
        batch += _events_of(sequences, row)
        if len(batch) >= BATCH or row == sequences.n_users - 1:
            added = await store.add(batch)
            n_stored, n_duplicates = n_stored + added.stored, n_duplicates + added.duplicates
            batch = []
            if on_progress is not None:
                on_progress(n_stored + n_duplicates, n_total)
    return Added(n_stored, n_duplicates)


def _events_of(sequences: Sequences, row: int) -> Iterator[Event]:
    """Without times, an event's time is its place: 1, 2, 3, …"""
    start, end = int(sequences.offsets[row]), int(sequences.offsets[row + 1])
    user, ids = str(sequences.user_ids[row]), sequences.vocabulary.ids
    is_int = sequences.vocabulary.id_type == "int"
    tokens = sequences.tokens[start:end].tolist()
    if sequences.times is None:
        times = [place * MICROSECONDS for place in range(1, len(tokens) + 1)]
    else:
        times = sequences.times[start:end].tolist()
    n_same: dict[tuple[int, int], int] = defaultdict(int)  # the same item at the same time again
    n_left_out = len(tokens) - KEPT
    for place, (token, moment) in enumerate(zip(tokens, times, strict=True)):
        n_same[token, moment] += 1
        if place >= n_left_out:
            item = ids[token]
            content = f"{moment} {n_same[token, moment]} {item}".encode("utf-8", "surrogatepass")
            event_id = "import-" + blake2b(content, digest_size=12).hexdigest()
            yield Event(user, int(item) if is_int else item, moment / MICROSECONDS, event_id)
