"""Things that settings choose by name: models, losses, objectives.

A name stands for `module:attribute`, which is imported when the name is first asked for. A name of
that very form is taken as it is, so that another package can bring its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar

from bert4rec.settings import nearest

T = TypeVar("T")


class Registry(Generic[T]):
    def __init__(self, kind: str, homes: Mapping[str, str]) -> None:
        self.kind, self._homes = kind, dict(homes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __contains__(self, name: object) -> bool:
        return name in self._homes or (isinstance(name, str) and ":" in name)

    def __getitem__(self, name: str) -> T:
        home = name if ":" in name else self._homes.get(name)
        if home is None:
            raise ValueError(
                f"{self.kind} is {name!r}{nearest(name, self)}: choose one of {', '.join(self)}"
            )
        module, _, attribute = home.partition(":")
        try:
            found: Any = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"{self.kind} is {name!r}, which cannot be imported: {error}"
            ) from None
        result: T = found
        return result
