"""Import the histories of a prepared data set, so that a service knows its users from the start.

An event's id follows from its content: importing the same table again adds nothing, and importing
a longer one adds what is new.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from hashlib import blake2b

from bert4rec.data.sequences import Sequences
from bert4rec.serving.store import SHOWN_EVENTS, AddResult, Event, HistoryStore

BATCH = 5000  # events per add: a service on the same store does not wait long for it
MICROSECONDS = 1_000_000


async def import_histories(
    store: HistoryStore, sequences: Sequences, on_progress: Callable[[int, int | None], None] | None = None
) -> AddResult:
    """Import the newest `SHOWN_EVENTS` of each user."""
    n_total = int(sequences.lengths.clip(max=SHOWN_EVENTS).sum())
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
    return AddResult(n_stored, n_duplicates)


def _events_of(sequences: Sequences, row: int) -> Iterator[Event]:
    """Without times, an event's time is its position: 1, 2, 3, …"""
    start, end = int(sequences.offsets[row]), int(sequences.offsets[row + 1])
    user, ids = str(sequences.user_ids[row]), sequences.vocabulary.ids
    is_int = sequences.vocabulary.id_type == "int"
    tokens = sequences.tokens[start:end].tolist()
    if sequences.times is None:
        times = [position * MICROSECONDS for position in range(1, len(tokens) + 1)]
    else:
        times = sequences.times[start:end].tolist()
    n_same: dict[tuple[int, int], int] = defaultdict(int)  # repeated items at the same time
    n_left_out = len(tokens) - SHOWN_EVENTS
    for position, (token, moment) in enumerate(zip(tokens, times, strict=True)):
        n_same[token, moment] += 1
        if position >= n_left_out:
            item = ids[token]
            content = f"{moment} {n_same[token, moment]} {item}".encode("utf-8", "surrogatepass")
            event_id = "import-" + blake2b(content, digest_size=12).hexdigest()
            yield Event(user, int(item) if is_int else item, moment / MICROSECONDS, event_id)
