"""Find items by their title."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from itertools import islice

import numpy as np

from bert4rec.data.sequences import Vocabulary

CANDIDATES = 2_000  # matches that are looked at, the most popular first
BETWEEN = "\n"


class Catalogue:
    """Titles as one text, the most popular first, so that a search is a scan at memory speed."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._by_popularity = np.argsort(-vocabulary.counts, kind="stable")
        names = (plain(self._name(int(token))) for token in self._by_popularity)
        self._text = BETWEEN + BETWEEN.join(names) + BETWEEN
        letters = np.frombuffer(self._text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        self._starts = np.flatnonzero(letters == ord(BETWEEN))

    def find(self, query: str, limit: int) -> list[int]:
        """Tokens whose title holds the query: at its start, at a word's start, anywhere."""
        wanted = plain(query)
        if not wanted:
            return [int(token) for token in self._by_popularity[:limit]]
        by_id = self._vocabulary.token(query.strip())
        found = {} if by_id is None else {by_id: -1}
        for rank, place in islice(self._matches(wanted), CANDIDATES):
            before = self._text[place - 1]
            quality = 0 if before == BETWEEN else 1 if not before.isalnum() else 2
            token = int(self._by_popularity[rank])
            found[token] = min(quality, found.get(token, quality))
        return sorted(found, key=lambda token: found[token])[:limit]  # stable: popular first

    def _matches(self, wanted: str) -> Iterator[tuple[int, int]]:
        """(rank by popularity, place in the text) of each match, in order."""
        place = self._text.find(wanted, 1)
        while place != -1:
            yield int(np.searchsorted(self._starts, place, side="right")) - 1, place
            place = self._text.find(wanted, place + 1)

    def _name(self, token: int) -> str:
        return self._vocabulary.title(token) or self._vocabulary.ids[token]


def plain(text: str) -> str:
    """Without case, accents and line breaks: "Amélie" is found by "amelie"."""
    spread = unicodedata.normalize("NFKD", text.casefold())
    letters = "".join(letter for letter in spread if not unicodedata.combining(letter))
    return " ".join(letters.split())
