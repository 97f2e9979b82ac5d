"""All histories as one flat array of tokens, and the vocabulary that maps tokens to raw ids.

On disk a prepared data set is a directory, memory-mapped on load: `meta.json`, `tokens.npy`,
`offsets.npy`, `times.npy` (if there are times), `items.parquet`, `users.parquet`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from bert4rec.data.database import read_columns, write_parquet

FORMAT_VERSION = 1
IdType = Literal["int", "str"]


def id_text(raw: object) -> str | None:
    """An id as text; None for what cannot be an id."""
    if isinstance(raw, str):
        return raw
    if isinstance(raw, bool) or raw is None:
        return None
    if isinstance(raw, int | np.integer):
        return str(int(raw))
    if isinstance(raw, float | np.floating):  # in a frame with gaps, integer ids are floats
        return str(int(raw)) if float(raw).is_integer() else None
    return None


class Vocabulary:
    """Raw id ↔ token. Ids are kept as text; `id_type` is the type in which they are returned."""

    def __init__(
        self,
        ids: Sequence[str],
        counts: NDArray[np.int64],
        titles: Sequence[str | None] | None = None,
        id_type: IdType = "str",
        extra: dict[str, list[str | None]] | None = None,
    ) -> None:
        assert len(ids) == len(counts)
        self.ids = ids if isinstance(ids, list) else list(ids)
        self.counts = np.asarray(counts, dtype=np.int64)
        self.titles = titles if titles is None or isinstance(titles, list) else list(titles)
        self.id_type: IdType = id_type
        self.extra = extra or {}

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def _token_of(self) -> dict[str, int]:
        return {text: token for token, text in enumerate(self.ids)}

    def token(self, raw: object) -> int | None:
        text = id_text(raw)
        return None if text is None else self._token_of.get(text)

    def encode(self, raws: Iterable[object]) -> tuple[list[int], list[object]]:
        """The tokens of the known ids in order, and the unknown ids in order."""
        raws, token_of = list(raws), self._token_of.get
        tokens = [token_of(raw) if type(raw) is str else self.token(raw) for raw in raws]
        if None not in tokens:
            return tokens, []  # type: ignore[return-value]
        known = [token for token in tokens if token is not None]
        return known, [raw for raw, token in zip(raws, tokens, strict=True) if token is None]

    def raw(self, token: int) -> str | int:
        return int(self.ids[token]) if self.id_type == "int" else self.ids[token]

    def title(self, token: int) -> str | None:
        return None if self.titles is None else self.titles[token]

    def save(self, path: Path) -> None:
        titles = [None] * len(self) if self.titles is None else self.titles
        columns: dict[str, NDArray[Any] | Sequence[Any]] = {
            "token": np.arange(len(self), dtype=np.int32),
            "item": self.ids,
            "count": self.counts,
            "title": titles,
        }
        write_parquet(path, columns | self.extra)

    @classmethod
    def load(cls, path: Path, id_type: IdType) -> Self:
        columns = read_columns(path)
        titles = columns.pop("title").tolist()
        columns.pop("token")
        ids, counts = columns.pop("item").tolist(), columns.pop("count").astype(np.int64)
        has_titles = any(title is not None for title in titles)
        extra = {name: column.tolist() for name, column in columns.items()}
        return cls(ids, counts, titles if has_titles else None, id_type, extra)


class Sequences:
    """All histories end to end in `tokens`; user `u` owns `tokens[offsets[u]:offsets[u + 1]]`."""

    def __init__(
        self,
        tokens: NDArray[np.int32],
        offsets: NDArray[np.int64],
        vocabulary: Vocabulary,
        user_ids: Sequence[str] | Path,
        *,
        user_id_type: IdType = "str",
        times: NDArray[np.int64] | None = None,
        meta: dict[str, Any] | None = None,
    ) -> None:
        assert offsets[0] == 0
        assert offsets[-1] == len(tokens)
        self.tokens, self.offsets, self.times = tokens, offsets, times
        self.vocabulary = vocabulary
        self.user_id_type: IdType = user_id_type
        self._user_source = user_ids
        self.meta = meta or {}
        self.directory: Path | None = None  # where it was loaded from

    n_users = property(lambda self: len(self.offsets) - 1)
    n_items = property(lambda self: len(self.vocabulary))
    n_interactions = property(lambda self: len(self.tokens))

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def __getitem__(self, row: int) -> NDArray[np.int32]:
        return self.tokens[self.offsets[row] : self.offsets[row + 1]]

    def user_blocks(self, n_interactions: int) -> Iterator[tuple[int, int]]:
        """Ranges of users with about `n_interactions`: work on them needs bounded memory."""
        first = 0
        while first < self.n_users:
            reach = self.offsets[first] + n_interactions
            last = int(np.searchsorted(self.offsets, reach, side="right")) - 1
            last = min(max(last, first + 1), self.n_users)
            yield first, last
            first = last

    @cached_property
    def user_ids(self) -> list[str] | list[int]:
        """Raw user ids by row; read on first use, as there may be many."""
        source = self._user_source
        texts = read_columns(source)["user"].tolist() if isinstance(source, Path) else source
        return [int(text) for text in texts] if self.user_id_type == "int" else list(texts)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of what a model sees of the data: tokens, offsets and item ids."""
        if "fingerprint" in self.meta:
            return str(self.meta["fingerprint"])
        return fingerprint_of(self.tokens, self.offsets, self.vocabulary.ids)

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        np.save(directory / "tokens.npy", self.tokens)
        np.save(directory / "offsets.npy", self.offsets)
        if self.times is not None:
            np.save(directory / "times.npy", self.times)
        self.vocabulary.save(directory / "items.parquet")
        rows = np.arange(self.n_users, dtype=np.int64)
        users = [str(raw) for raw in self.user_ids]
        write_parquet(directory / "users.parquet", {"row": rows, "user": users})
        meta = self.meta | {
            "format_version": FORMAT_VERSION,
            "n_users": self.n_users,
            "n_items": self.n_items,
            "n_interactions": self.n_interactions,
            "item_id_type": self.vocabulary.id_type,
            "user_id_type": self.user_id_type,
            "fingerprint": self.fingerprint,
        }
        (directory / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        directory = Path(directory)
        meta_path = directory / "meta.json"
        if not meta_path.is_file():
            raise ValueError(f"{directory} is not a prepared data set: it has no meta.json")
        meta = json.loads(meta_path.read_text(encoding="utf-8"))
        if meta["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"{directory} has format version {meta['format_version']}, this program reads "
                f"{FORMAT_VERSION}: prepare the data again"
            )
        times = directory / "times.npy"
        tokens, offsets = np.load(directory / "tokens.npy", mmap_mode="r"), np.load(directory / "offsets.npy")
        if len(tokens) != meta["n_interactions"] or offsets[-1] != len(tokens):
            raise ValueError(f"{directory} is damaged (its files differ): prepare the data again")
        sequences = cls(
            tokens,
            offsets,
            Vocabulary.load(directory / "items.parquet", meta["item_id_type"]),
            directory / "users.parquet",
            user_id_type=meta["user_id_type"],
            times=np.load(times, mmap_mode="r") if times.exists() else None,
            meta=meta,
        )
        sequences.directory = directory.resolve()
        return sequences


def fingerprint_of(tokens: NDArray[np.int32], offsets: NDArray[np.int64], item_ids: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for start in range(0, len(tokens), 1 << 24):
        digest.update(np.ascontiguousarray(tokens[start : start + (1 << 24)]).data)
    digest.update(np.ascontiguousarray(offsets).data)
    for start in range(0, len(item_ids), 1 << 16):
        texts = "\0".join(item_ids[start : start + (1 << 16)])
        digest.update(texts.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()
