"""The embedded data set: an invented film club, whose best possible hit rate is known.

Every member's next film is drawn with exact weights that depend only on the films they have seen.
So a model that reads the whole history could know these weights, and no ranking beats the ranking
by them (`best_possible`). Three things make the weights:

- Franchises are watched in order, several at a time. Members pause after a part, come back within
  the next few films, and give a franchise up if they stay away too long. So the next part follows
  from the last dozen films, and hardly from the last one.
- New films and first parts come from the genres of the last eight films: a taste that drifts.
- Within a genre, popularity is skewed (Zipf).

All arithmetic is on integers, and the only randomness is the raw output of PCG64: the data is the
same on every platform and with every version of numpy.
"""

import csv
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bert4rec.durable import new_file

# Legend: U members still watching, V films, F franchises.

SEED = 20190414
N_USERS = 3000
TASTE_MEMORY = 8  # films that make up the current taste

# How strongly an unfinished franchise pulls, by the number of films since its last part: little at
# first, most after two to four films, not at all after twelve. No two values are equal, so no two
# unfinished franchises tie.
PULL = np.array([0, 14, 66, 60, 52, 42, 32, 24, 17, 12, 8, 5, 3, 0])
NOVELTY = 100  # on the same scale: the pull of all new films together
TASTE_UNITS = 1000  # a taste is this many units spread over the genres

FIRST_TIME = 1_672_531_200  # 2023-01-01, in seconds
HOUR = 3600

PARTS = (3, 4, 5, 6, 7)  # of the five franchises of each genre
N_SINGLES = 20  # films outside franchises, per genre

# Per genre, ten adjectives and ten nouns.
WORDS = tomllib.loads((resources.files("bert4rec.data") / "demo_words.toml").read_text(encoding="utf-8"))
N_GENRES = len(WORDS)
ROMAN = ("", " II", " III", " IV", " V", " VI", " VII")


@dataclass(frozen=True)
class DemoFilms:
    """The invented films as arrays; a film is its row."""

    titles: list[str]
    genre: NDArray[np.int64]  # (V,)
    franchise: NDArray[np.int64]  # (V,), F where there is none
    part: NDArray[np.int64]  # (F + 1, 8): the film that is this part, V past the end
    appeal: NDArray[np.int64]  # (V,): Zipf inside the genre; 0 for films that only follow another


@lru_cache(maxsize=1)
def catalogue() -> DemoFilms:
    n_franchises = N_GENRES * len(PARTS)
    films: list[tuple[str, int, int, int]] = []
    for g, words in enumerate(WORDS.values()):
        adjectives, nouns = words["adjectives"].split(), words["nouns"].split()
        # The first parts are among the better known films, interleaved with single ones. The genre's
        # number is added so that equally high ranks of two genres do not tie.
        for f, n_parts in enumerate(PARTS):
            name, appeal = f"The {adjectives[f]} {nouns[f]}", 1000 // (2 * f + 1) + g
            films += [(name + ROMAN[p], g, g * len(PARTS) + f, 0 if p else appeal) for p in range(n_parts)]
        for s in range(N_SINGLES):  # off the diagonal, where the franchises are
            rank = s + min(s + 1, len(PARTS))
            title = f"{adjectives[s % 10]} {nouns[(s + 1 + s // 10) % 10]}"
            films.append((title, g, n_franchises, 1000 // (rank + 1) + g))
    titles = [film[0] for film in films]
    genre, franchise, appeals = np.array([film[1:] for film in films]).T

    part = np.full((n_franchises + 1, len(ROMAN) + 1), len(films))
    for f in range(n_franchises):
        members = np.flatnonzero(franchise == f)
        part[f, : len(members)] = members
    return DemoFilms(titles, genre, franchise, part, appeals)


class _Club:
    """What every member has seen so far, in the form that decides the next film."""

    def __init__(self, n_users: int) -> None:
        self.films = catalogue()
        n_films, n_franchises = len(self.films.titles), len(self.films.part) - 1
        self.is_unseen = np.ones((n_users, n_films), bool)
        self.n_parts = np.zeros((n_users, n_franchises + 1), np.int64)
        self.last_step = np.full((n_users, n_franchises + 1), -len(PULL))
        self.recent = np.full((n_users, TASTE_MEMORY), -1)  # genres, the latest in a ring
        self.step = 0

    def keep(self, rows: NDArray[np.bool_]) -> None:
        """Keep only these members; the others have seen their last film."""
        self.is_unseen, self.n_parts = self.is_unseen[rows], self.n_parts[rows]
        self.last_step, self.recent = self.last_step[rows], self.recent[rows]

    def weights(self) -> NDArray[np.int64]:
        """(U, V): the exact weight of every film as the next one."""
        n_users, n_films = self.is_unseen.shape
        seen_of_genre = (self.recent[:, :, None] == np.arange(N_GENRES)).sum(1)
        taste = 1 + seen_of_genre**2
        taste = TASTE_UNITS * taste // taste.sum(1, keepdims=True)
        new = taste[:, self.films.genre] * self.films.appeal * self.is_unseen

        gap = np.minimum(self.step - self.last_step, len(PULL) - 1)
        pull = np.where(self.n_parts > 0, PULL[gap], 0)
        following = self.films.part[np.arange(self.films.part.shape[0]), self.n_parts]
        # Finished franchises write into one more column, which is cut off again.
        weights = np.concatenate([new * NOVELTY, np.zeros((n_users, 1), np.int64)], axis=1)
        scale = TASTE_UNITS * self.films.appeal.sum() // N_GENRES
        np.maximum.at(weights, (np.arange(n_users)[:, None], following), pull * scale)
        return weights[:, :n_films]

    def watch(self, film: NDArray[np.int64]) -> None:
        """Every member sees one film."""
        rows = np.arange(len(film))
        self.is_unseen[rows, film] = False
        franchise = self.films.franchise[film]
        self.n_parts[rows, franchise] += 1
        self.n_parts[:, -1] = 0  # the column of films without a franchise
        self.last_step[rows, franchise] = self.step
        self.recent[:, self.step % TASTE_MEMORY] = self.films.genre[film]
        self.step += 1


def _draw(weights: NDArray[np.int64], source: np.random.PCG64) -> NDArray[np.int64]:
    """One film per member, in proportion to its row of weights."""
    reached = weights.cumsum(axis=1)
    # The remainder of 64 random bits: a bias of 1 in 10^8, and no rounding that may differ.
    ticket = (source.random_raw(len(weights)) % reached[:, -1].astype(np.uint64)).astype(np.int64)
    film: NDArray[np.int64] = (reached <= ticket[:, None]).sum(axis=1)
    return film


@dataclass(frozen=True)
class _Viewings:
    """All viewings by member, and the rank of each member's last film by its true weight."""

    film: NDArray[np.int64]
    seconds: NDArray[np.int64]
    lengths: NDArray[np.int64]
    last_rank: NDArray[np.int64]  # (U,) 1 is best; equal weights are placed before
    last_chances: NDArray[np.float64]  # (U, 20): probabilities of the 20 likeliest last films


@lru_cache(maxsize=1)
def _viewings() -> _Viewings:
    source = np.random.PCG64(SEED)

    def uniform(size: int, below: int) -> NDArray[np.int64]:
        return (source.random_raw(size) % np.uint64(below)).astype(np.int64)

    # 10 to 63 films, about 25 on average, with a long tail.
    lengths = 10 + uniform(N_USERS, 50) * uniform(N_USERS, 50) // 50 + uniform(N_USERS, 6)
    film = np.zeros((N_USERS, int(lengths.max())), np.int64)
    gaps = np.zeros_like(film)
    last_rank = np.zeros(N_USERS, np.int64)
    last_chances = np.zeros((N_USERS, 20))
    club, members = _Club(N_USERS), np.arange(N_USERS)
    for step in range(film.shape[1]):
        weights = club.weights()
        chosen = _draw(weights, source)
        film[members, step] = chosen
        gaps[members, step] = HOUR + uniform(len(members), 96 * HOUR)

        ends = lengths[members] == step + 1
        own, final = weights[ends], members[ends]
        last_rank[final] = (own >= own[np.arange(len(own)), chosen[ends]][:, None]).sum(1)
        last_chances[final] = -np.sort(-own, axis=1)[:, :20] / own.sum(1, keepdims=True)
        club.watch(chosen)
        club.keep(~ends)
        members = members[~ends]

    is_real = np.arange(film.shape[1]) < lengths[:, None]
    starts = FIRST_TIME + uniform(N_USERS, 365 * 24 * HOUR)
    seconds = starts[:, None] + gaps.cumsum(axis=1)
    return _Viewings(film[is_real], seconds[is_real], lengths, last_rank, last_chances)


def _item_ids() -> list[str]:
    return [f"m{row + 1:04d}" for row in range(len(catalogue().titles))]


def interactions() -> list[tuple[str, str, int]]:
    """(user, item, unix seconds), user by user and in time order."""
    viewings, names = _viewings(), _item_ids()
    users = np.repeat([f"u{row + 1:04d}" for row in range(N_USERS)], viewings.lengths).tolist()
    films = [names[film] for film in viewings.film.tolist()]
    return list(zip(users, films, viewings.seconds.tolist(), strict=True))


def items() -> list[dict[str, str | None]]:
    """The catalogue: item, title, genre, franchise (its first part's title)."""
    films, genres = catalogue(), list(WORDS)
    titles = [*films.titles, None]
    return [
        {"item": item, "title": title, "genre": genres[g], "franchise": titles[films.part[f, 0]]}
        for item, title, g, f in zip(_item_ids(), films.titles, films.genre, films.franchise, strict=True)
    ]


def best_possible() -> dict[str, float]:
    """The score of a ranking by the true weights on every user's last item, over all items.

    `HR@k` and `NDCG@k` count the items that were drawn: compare a model with these. `expected HR@k`
    and `expected NDCG@k` are their means over all draws.
    """
    rank, chances = _viewings().last_rank, _viewings().last_chances
    gain = 1 / np.log2(np.arange(chances.shape[1]) + 2)
    best = {}
    for k in (1, 5, 10, 20):
        best[f"HR@{k}"] = float((rank <= k).mean())
        best[f"NDCG@{k}"] = float(np.where(rank <= k, 1 / np.log2(rank + 1), 0).mean())
        best[f"expected HR@{k}"] = float(chances[:, :k].sum(1).mean())
        best[f"expected NDCG@{k}"] = float((chances * gain)[:, :k].sum(1).mean())
    return best


def write_csv(directory: Path) -> tuple[Path, Path]:
    """Write the data set as `interactions.csv` and `items.csv`, like a user's own tables."""
    directory.mkdir(parents=True, exist_ok=True)
    tables: dict[str, list[Iterable[object]]] = {
        "interactions.csv": [("user", "item", "timestamp"), *interactions()],
        "items.csv": [("item", "title", "genre", "franchise"), *(item.values() for item in items())],
    }
    for name, rows in tables.items():
        with new_file(directory / name) as path, path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(rows)
    return directory / "interactions.csv", directory / "items.csv"
