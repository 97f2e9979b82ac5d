"""Find items by title."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from itertools import islice

import numpy as np

from bert4rec.data.sequences import Vocabulary

MAX_MATCHES = 2_000  # considered per search, the most popular first
SEPARATOR = "\n"


class TitleSearch:
    """All titles in one string, the most popular first: a search is a scan at memory speed."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._by_popularity = np.argsort(-vocabulary.counts, kind="stable")
        names = (plain(self._name(int(token))) for token in self._by_popularity)
        self._text = SEPARATOR + SEPARATOR.join(names) + SEPARATOR
        letters = np.frombuffer(self._text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        self._starts = np.flatnonzero(letters == ord(SEPARATOR))

    def find(self, query: str, limit: int) -> list[int]:
        """Tokens of items whose title contains `query`: first at its start, then at a word's."""
        wanted = plain(query)
        if not wanted:
            return [int(token) for token in self._by_popularity[:limit]]
        by_id = self._vocabulary.token(query.strip())
        found = {} if by_id is None else {by_id: -1}
        for rank, place in islice(self._matches(wanted), MAX_MATCHES):
            before = self._text[place - 1]
            quality = 0 if before == SEPARATOR else 1 if not before.isalnum() else 2
            token = int(self._by_popularity[rank])
            found[token] = min(quality, found.get(token, quality))
        return sorted(found, key=lambda token: found[token])[:limit]  # stable: popular first

    def _matches(self, wanted: str) -> Iterator[tuple[int, int]]:
        """(rank by popularity, place in the string) of each match, in order."""
        place = self._text.find(wanted, 1)
        while place != -1:
            yield int(np.searchsorted(self._starts, place, side="right")) - 1, place
            place = self._text.find(wanted, place + 1)

    def _name(self, token: int) -> str:
        return self._vocabulary.title(token) or self._vocabulary.ids[token]


def plain(text: str) -> str:
    """Without case, accents and line breaks: "amelie" finds "Amélie"."""
    decomposed = unicodedata.normalize("NFKD", text.casefold())
    letters = "".join(letter for letter in decomposed if not unicodedata.combining(letter))
    return " ".join(letters.split())
