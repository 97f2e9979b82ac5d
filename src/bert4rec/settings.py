"""What all settings have in common: frozen, typed, strict about names, and chosen by name.

A `Registry` maps the names of models, losses and objectives to `module:attribute`, which is imported
when the name is first asked for. A name of that very form is taken as it is, so that another package
can bring its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module, resources
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

Share = Annotated[float, Field(ge=0, le=1)]
Dropout = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _none_as_text(cls, value: Any) -> Any:
        return None if value == "none" else value  # TOML has no null


AnySettings = TypeVar("AnySettings", bound="Settings")


def parse_settings(cls: type[AnySettings], values: Any, place: str) -> AnySettings:
    """`values` as an instance of `cls`; a ValueError names each setting that is wrong."""
    if isinstance(values, cls):
        return values
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise ValueError("; ".join(_explain(e, place, cls) for e in error.errors())) from None


def _explain(error: Any, place: str, cls: type[Settings]) -> str:
    parts = [str(part) for part in error["loc"]]
    name = ".".join([*([place] if place else []), *parts])
    if error["type"] == "extra_forbidden":
        known = _names_in_section(cls, parts[:-1])
        return f"unknown setting {name!r}{nearest(parts[-1], known)}; there are: {', '.join(known)}"
    if error["type"] == "value_error":
        message = str(error["ctx"]["error"])
        return message if name in message else f"{name}: {message}"
    return f"{name} = {error['input']!r}: {error['msg']}"


def description_of(cls: type[Settings], name: str) -> str:
    """What a setting means: a subclass may change a default without saying it again."""
    fields = (each.__dict__.get("__pydantic_fields__", {}).get(name) for each in cls.__mro__)
    return next((field.description for field in fields if field and field.description), "")


def _names_in_section(cls: type[Settings], parts: list[str]) -> list[str]:
    """The settings of `cls`, or of a section within it."""
    for part in parts:
        section = cls.model_fields[part].annotation
        assert isinstance(section, type)
        assert issubclass(section, Settings)
        cls = section
    return list(cls.model_fields)


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean …?)` where a known name is close to `word`."""
    close = difflib.get_close_matches(word, sorted(known), 1, 0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def recipe_names() -> list[str]:
    folder = resources.files("bert4rec") / "recipes"
    return sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".toml"))


def recipe_text(name: str) -> str:
    if name not in recipe_names():
        raise ValueError(
            f"no recipe is named {name!r}{nearest(name, recipe_names())}; there are: {', '.join(recipe_names())}"
        )
    return (resources.files("bert4rec") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")


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
            raise ValueError(f"{self.kind} is {name!r}{nearest(name, self)}: choose one of {', '.join(self)}")
        module, _, attribute = home.partition(":")
        try:
            found: Any = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{self.kind} is {name!r}, which cannot be imported: {error}") from None
        result: T = found
        return result
