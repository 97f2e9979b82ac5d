"""The settings of a run: recipe, file and overrides become one `Config`, resolved once.

`load_config(recipe, file, overrides)` is the way in. `resolve(config, n_items)` replaces what is
`auto` when a run starts; from there on everybody reads the same `RunConfig`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from functools import partial
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from bert4rec.data.filters import DataSettings
from bert4rec.losses import LOSSES, AutoLoss, LossSettings
from bert4rec.models import MODELS
from bert4rec.models.sequence_model import ModelSettings
from bert4rec.objectives import OBJECTIVES, NextItemStage, StageSettings
from bert4rec.settings import Count, Positive, Registry, Settings, description_of, nearest, parse_settings, recipe_text

SHARP_FROM = 10_000  # items from which on a softmax that starts even learns slowly
SAMPLED_FROM = 20_000  # items from which on the softmax over all of them dominates a step


class TrainingSettings(Settings):
    seed: Count = Field(0, description="fixes everything that is random, data order included")
    batch_size: Positive = Field(32, description="sequences per step, of all processes together")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.01, description="AdamW's decay; never on biases and LayerNorm"
    )
    warmup_steps: Count = Field(100, description="steps of linear warm-up at the start of a stage")
    on_validation: bool = Field(
        False, description="train on the validation items, too; all epochs run, and the last weights are kept"
    )
    validate_every: Positive = Field(2, description="epochs between two validations")
    validation_users: Positive | None = Field(
        2000, description="validate on a random sample of this many users, the same throughout; none takes all"
    )
    workers: Positive | None = Field(
        None, description="threads that share the cores; defaults to one per core, at most 8"
    )
    shards: Positive | None = Field(
        None,
        description="parts that the users are split into; each process trains on one at a time. Defaults to the number "
        "of processes. Batches and masks depend on it, not on the number of processes",
    )
    shard_items: bool = Field(
        False,
        description="shard the item embeddings over the processes, for catalogues too large for "
        "one; needs a sampled loss",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(
        "auto", description="where to train: auto takes a GPU when there is one"
    )
    precision: Literal["auto", "float32", "bf16"] = Field(
        "auto", description="auto is bf16 on CUDA and float32 elsewhere; bf16 on a CPU is tested first"
    )


class EvaluationSettings(Settings):
    ks: Annotated[tuple[Positive, ...], Field(min_length=1)] = Field(
        (1, 5, 10, 20), description="the k of HR@k, NDCG@k, …"
    )
    exclude_seen: bool = Field(True, description="never recommend what the history holds already")
    users: Positive | None = Field(None, description="evaluate a random sample of this many users; none takes all")


class Choice(NamedTuple):
    """A section whose settings are those of the model, loss or objective that it names."""

    registry: Registry[Any]
    key: str = "name"
    default: str | None = None

    def settings_class(self, name: Any) -> type[Settings]:
        found = self.registry[str(name)]
        settings: type[Settings] = getattr(found, "settings_class", found)
        return settings

    def parse(self, values: Any, place: str) -> Any:
        if isinstance(values, Settings):
            return values
        named = {self.key: self.default} | values if isinstance(values, dict) else {}
        if named.get(self.key) is None:
            raise ValueError(f"{place}.{self.key} is missing: choose one of {', '.join(self.registry)}")
        return parse_settings(self.settings_class(named[self.key]), named, place)


CHOICES = {
    "model": Choice(MODELS, default="bert4rec"),
    "loss": Choice(LOSSES, default="auto"),
    "stages": Choice(OBJECTIVES, key="objective"),
}


def _parse_stages(values: Any) -> Any:
    if not isinstance(values, list | tuple):
        raise ValueError("stages is not a list: write [[stages]] above the settings of each stage")
    return tuple(CHOICES["stages"].parse(stage, f"stages.{place}") for place, stage in enumerate(values))


Model = Annotated[SerializeAsAny[ModelSettings], BeforeValidator(partial(CHOICES["model"].parse, place="model"))]
Loss = Annotated[SerializeAsAny[LossSettings], BeforeValidator(partial(CHOICES["loss"].parse, place="loss"))]
Stages = Annotated[tuple[SerializeAsAny[StageSettings], ...], BeforeValidator(_parse_stages)]


class Config(Settings):
    """What was asked for. The defaults are the recipe `default`."""

    data: DataSettings = DataSettings()
    model: Model = Field(default_factory=lambda: CHOICES["model"].parse({}, "model"))
    loss: Loss = AutoLoss()
    stages: Stages = Field(default_factory=lambda: default_stages("bert4rec"))
    training: TrainingSettings = TrainingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()

    @classmethod
    def parse(cls, values: dict[str, Any], where: str) -> Self:
        try:
            return parse_settings(cls, values, "")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    @model_validator(mode="before")
    @classmethod
    def _stages_of_the_model(cls, values: Any) -> Any:
        """Without stages a model is trained by its own objective."""
        if not isinstance(values, dict) or "stages" in values or "model" not in values:
            return values
        return values | {"stages": default_stages(CHOICES["model"].parse(values["model"], "model").name)}

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        name = self.model.name
        has_mask = getattr(MODELS[name], "has_mask", False)
        for place, stage in enumerate(self.stages):
            if reason := _why_not(name, stage):
                raise ValueError(f"stages.{place}.{reason}")
            attention_dropout = getattr(self.model, "attention_dropout", 0)
            if has_mask and stage.objective == "next_item" and attention_dropout:
                raise ValueError(
                    f"stages.{place}.objective = next_item does not go with "
                    "model.attention_dropout: set model.attention_dropout to 0"
                )
        if self.training.on_validation and self.data.split != "leave-one-out":
            raise ValueError("training.on_validation needs data.split = leave-one-out")
        return self


class RunConfig(Config):
    """What a run does: no value is `auto` that depends on the data. Models are saved with it."""

    @model_validator(mode="after")
    def _is_resolved(self) -> Self:
        if self.loss.name == "auto" or getattr(self.model, "output_gain", None) == "auto":
            raise ValueError("a value is `auto`: resolve(config, n_items) replaces it")
        return self


AnyConfig = TypeVar("AnyConfig", bound=Config)


def resolve(config: Config, n_items: int) -> RunConfig:
    """The same settings with every `auto` replaced by what this catalogue needs."""
    values = config.model_dump()
    if config.loss.name == "auto":
        sampled = {"name": "sampled-softmax", "negatives": "popularity", "n_negatives": 2048}
        is_large = n_items >= SAMPLED_FROM
        values["loss"] = sampled if is_large else {"name": "cross-entropy"}
    if values["model"].get("output_gain") == "auto":
        values["model"]["output_gain"] = 4.0 if n_items >= SHARP_FROM else 1.0
    return RunConfig.model_validate(values)


def _why_not(model: str, stage: StageSettings) -> str | None:
    """What keeps this model from being trained by this stage, if anything does."""
    objective, objectives = stage.objective, MODELS[model].objectives
    if not objectives:
        return f"objective = {objective}: {model} cannot be trained so, it is only fitted"
    is_from_elsewhere = ":" in objective  # another package knows which models it is for
    if objective not in objectives and not is_from_elsewhere:
        return f"objective = {objective}: {model} cannot be trained so, it has {', '.join(objectives)}"
    if getattr(stage, "bidirectional_prefix", False) and "cloze" not in objectives:
        return f"bidirectional_prefix: {model} reads histories in one direction"
    return None


def resolved_values(config: Config, run: RunConfig) -> str:
    """What `auto` became, as in `loss.name = cross-entropy`; empty if nothing was."""
    wanted = {name: value for name, value, _ in setting_descriptions(config)}
    found = ((name, value) for name, value, _ in setting_descriptions(run) if wanted.get(name) == "auto" != value)
    return ", ".join(f"{name} = {value}" for name, value in found)


def default_stages(model: str) -> tuple[StageSettings, ...]:
    """Of `bert4rec` those of the recipe `default`; of any other model its own objective."""
    objectives = MODELS[model].objectives
    if not objectives:
        return ()
    if model == "bert4rec":
        second = NextItemStage(bidirectional_prefix=True, epochs=8, learning_rate=1e-3)
        return (NextItemStage(), second)
    return (OBJECTIVES[objectives[0]].model_validate({}),)


def load_config(recipe: str = "default", file: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """The recipe's settings, the file's on top of them, and `section.key=value` on top of both."""
    values = tomllib.loads(recipe_text(recipe))
    if file is not None:
        values = _merge(values, read_toml(Path(file)))
    values = apply_overrides(values, overrides)
    return Config.parse(values, f"recipe {recipe!r}" if file is None else str(file))


def override_config(config: AnyConfig, overrides: Iterable[str]) -> AnyConfig:
    """A copy of `config` with `section.key=value` on top."""
    return type(config).parse(apply_overrides(config.model_dump(), overrides), "--set")


def setting_descriptions(config: Config) -> list[tuple[str, str, str]]:
    """(section.key, value, meaning) of every setting of this run."""
    sections: list[tuple[str, Settings]] = [
        ("data", config.data),
        ("model", config.model),
        ("loss", config.loss),
        *((f"stages.{place}", stage) for place, stage in enumerate(config.stages)),
        ("training", config.training),
        ("evaluation", config.evaluation),
    ]
    return [
        (f"{section}.{key}", str(getattr(settings, key)), description_of(type(settings), key))
        for section, settings in sections
        for key in type(settings).model_fields
    ]


def apply_overrides(values: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """`values` with each `section.key=value` put in its place; a list is counted from 0."""
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise ValueError(f"--set {override!r}: write section.key=value, as in model.dim=128")
        try:
            value: Any = json.loads(text)
        except json.JSONDecodeError:
            value = text.strip()  # a bare word is a string: nobody has to quote for the shell
        if len(parts) == 1:
            parts = _full_name(parts[0], values)
        if parts[0] == "stages":
            stages = values.get("stages")
            if stages is None:
                stages = [stage.model_dump() for stage in default_stages(_model_name(values))]
            if not stages:
                raise ValueError(f"--set {key}: the model is only fitted, it has no stages")
            if len(parts) != 3 or not parts[1].isdigit() or int(parts[1]) >= len(stages):
                raise ValueError(
                    f"--set {key}: write stages.N.key, N from 0 to {len(stages) - 1}, as in stages.0.epochs=20"
                )
            place = int(parts[1])
            stages = [*stages]
            stages[place] = _merge_named(stages[place], {parts[2]: value}, "stages")
            values = values | {"stages": stages}
        else:
            for part in reversed(parts):
                value = {part: value}
            values = _merge(values, value)
    return values


def _full_name(key: str, values: dict[str, Any]) -> list[str]:
    """`seed` alone means `training.seed`: the only setting of the run that has the name."""
    config = Config.parse(values, "the settings so far")
    names = [name for name, _, _ in setting_descriptions(config) if name.split(".")[-1] == key]
    if len(names) == 1:
        return names[0].split(".")
    if names:
        raise ValueError(f"--set {key}: several settings have that name: {', '.join(names)}")
    known = {name.split(".")[-1] for name, _, _ in setting_descriptions(config)}
    raise ValueError(f"--set {key}: no setting has that name{nearest(key, known)}; write section.key=value")


def _model_name(values: dict[str, Any]) -> str:
    model = values.get("model")
    return str(model.get("name", "bert4rec")) if isinstance(model, dict) else "bert4rec"


def _merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """`top` over `base`; another model keeps the stages that can train it, or has its own."""
    both = base | top
    for key in base.keys() & top.keys():
        if isinstance(base[key], dict) and isinstance(top[key], dict):
            both[key] = _merge_named(base[key], top[key], key)
    if "stages" in base and "stages" not in top and _model_name(both) != _model_name(base):
        parsed = zip(base["stages"], _parse_stages(base["stages"]), strict=True)
        both["stages"] = [stage for stage, settings in parsed if _why_not(_model_name(both), settings) is None]
        if not both["stages"]:
            del both["stages"]
    return both


def _merge_named(base: dict[str, Any], top: dict[str, Any], section: str) -> dict[str, Any]:
    """`top` over `base`; another model, loss or objective keeps only the settings that it has."""
    choice = CHOICES.get(section)
    if choice is not None and top.get(choice.key, base.get(choice.key)) != base.get(choice.key):
        fields = choice.settings_class(top[choice.key]).model_fields
        base = {name: value for name, value in base.items() if name in fields}
    return base | top


def read_toml(path: Traversable) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a TOML file ({error})") from None
