"""The invented films of the embedded data set: titles, genres, franchises, popularity.

Legend: V films, F franchises.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

PARTS = (3, 4, 5, 6, 7)  # of the five franchises of each genre
N_SINGLES = 20  # films outside franchises, a genre

# Ten adjectives and ten nouns a genre; no noun stands in two genres, so no two titles are equal.
WORDS = {
    "Adventure": (
        "Glass Hidden Burning Emerald Lost Copper Broken Northern Drowned Whispering",
        "Harbour Caravan Lagoon Compass Jungle Expedition Lighthouse Volcano Atlas Island",
    ),
    "Comedy": (
        "Accidental Borrowed Clumsy Reluctant Cheerful Inverted Awkward Second-Hand Noisy Wobbly",
        "Butler Wedding Neighbour Landlord Orchestra Bakery Mayor Holiday Dentist Reunion",
    ),
    "Crime": (
        "Silent Crooked Velvet Midnight Marked Paper Cold Double Nameless Patient",
        "Alibi Informer Heist Verdict Witness Ransom Inspector Forger Ledger Suspect",
    ),
    "Drama": (
        "Quiet Fading Autumn Distant Tender Unfinished Slow Winter Faithful Salted",
        "Letter Orchard Daughter River Farewell Window Teacher Garden Promise Station",
    ),
    "Fantasy": (
        "Silver Thorn Seventh Moonlit Forgotten Ivory Sleeping Crimson Wandering Elder",
        "Crown Dragon Oracle Kingdom Sorcerer Gate Raven Tower Prophecy Giant",
    ),
    "Horror": (
        "Hollow Pale Rotting Locked Crawling Faceless Buried Starving Blind Thirteenth",
        "Cellar Mirror Scarecrow Asylum Nursery Chapel Doll Swamp Visitor Attic",
    ),
    "Romance": (
        "Sunlit Parisian Stolen Summer Secret Golden Sudden Handwritten Rainy Barefoot",
        "Kiss Terrace Dance Bouquet Stranger Balcony Melody Sailor Café Proposal",
    ),
    "Space": (
        "Orbital Frozen Last Magnetic Solar Stranded Quantum Red Infinite Orphan",
        "Colony Signal Comet Beacon Starship Airlock Nebula Android Frontier Satellite",
    ),
}
N_GENRES = len(WORDS)
ROMAN = ("", " II", " III", " IV", " V", " VI", " VII")


@dataclass(frozen=True)
class Catalogue:
    """The films as arrays; a film is its row."""

    titles: list[str]
    genres: list[str]
    franchises: list[str | None]
    genre: NDArray[np.int64]  # (V,)
    franchise: NDArray[np.int64]  # (V,), F where there is none
    part: NDArray[np.int64]  # (F + 1, 8): the film that is this part, V past the end
    appeal: NDArray[np.int64]  # (V,): Zipf inside the genre; 0 for films that only follow another


@lru_cache(maxsize=1)
def catalogue() -> Catalogue:
    films: list[tuple[str, str, str | None]] = []
    for genre, (adjectives, nouns) in WORDS.items():
        adjective, noun = adjectives.split(), nouns.split()
        for f, n_parts in enumerate(PARTS):
            name = f"The {adjective[f]} {noun[f]}"
            films += [(name + ROMAN[p], genre, name) for p in range(n_parts)]
        for s in range(N_SINGLES):  # off the diagonal, where the franchises are
            films.append((f"{adjective[s % 10]} {noun[(s + 1 + s // 10) % 10]}", genre, None))
    titles, genres, franchises = (list(column) for column in zip(*films, strict=True))

    names = sorted({name for name in franchises if name is not None}, key=franchises.index)
    franchise = np.array([names.index(n) if n else len(names) for n in franchises])
    part = np.full((len(names) + 1, len(ROMAN) + 1), len(films))
    for f in range(len(names)):
        members = np.flatnonzero(franchise == f)
        part[f, : len(members)] = members

    appeal = np.zeros(len(films), np.int64)
    for g, genre in enumerate(WORDS):
        own = [i for i, own_genre in enumerate(genres) if own_genre == genre]
        firsts = [i for i in own if franchises[i] == titles[i]]
        singles = [i for i in own if franchises[i] is None]
        # Franchises are among the better known films, interleaved with single ones.
        by_rank = [film for pair in zip(firsts, singles, strict=False) for film in pair]
        by_rank += singles[len(firsts) :]
        # The genre's number is added so that equally high ranks of two genres do not tie.
        appeal[by_rank] = [1000 // (rank + 1) + g for rank in range(len(by_rank))]
    index = {genre: g for g, genre in enumerate(WORDS)}
    return Catalogue(
        titles, genres, franchises, np.array([index[g] for g in genres]), franchise, part, appeal
    )
