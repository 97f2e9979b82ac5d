"""The settings of a run: frozen, typed, and strict about names.

`load_config(recipe, file, overrides)` is the way in. A recipe of the package comes first, then a
TOML file, then `key=value` pairs; nobody writes to a configuration after that.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


ATTENTION_MODELS = ("bert4rec", "sasrec")  # those that have heads


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _none_is_nothing(cls, value: Any) -> Any:
        return None if value == "none" else value  # TOML has no null


class DataConfig(Settings):
    min_user_actions: Count = Field(0, description="drop users with fewer actions than this")
    min_item_actions: Count = Field(0, description="drop items with fewer actions than this")
    k_core: Count = Field(
        0, description="repeat both minimum filters with this number until stable"
    )
    min_rating: float | None = Field(None, description="drop interactions rated lower than this")
    drop_repeats: bool = Field(False, description="keep a user's first action on an item only")
    keep_last: Positive | None = Field(None, description="keep the last N actions of a user")
    split: Literal["leave-one-out", "global-time"] = Field(
        "leave-one-out", description="how the test and validation items are held out"
    )


class ModelConfig(Settings):
    name: str = Field("bert4rec", description="which model; `bert4rec models` lists them")
    dim: Positive = Field(64, description="width of the item vectors and of every layer")
    hidden: Positive | None = Field(
        None, description="width of recurrent states (gru4rec, narm); none is dim"
    )
    tied_output: bool = Field(
        False, description="gru4rec: score with the item vectors, not with a matrix of its own"
    )
    heads: Positive = Field(2, description="attention heads a layer; must divide dim")
    layers: Positive = Field(2, description="Transformer blocks")
    max_len: Annotated[int, Field(ge=2)] = Field(
        100, description="longest history that is read, [MASK] included; older items are left out"
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.2, description="dropout of hidden layers"
    )
    output_dropout: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="dropout of the last layer (gru4rec, narm); none is dropout"
    )
    attention_dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="dropout of attention probabilities (slow on a CPU: no fused kernel)"
    )
    head_norm: bool = Field(
        True, description="LayerNorm after the output head's GELU, as in the authors' code"
    )
    head_gain: Annotated[float, Field(gt=0)] = Field(
        1.0,
        description="bert4rec: what that LayerNorm's weights start with; more is a sharper softmax "
        "from the start, which pays with large catalogues",
    )
    init: Literal["near", "identity", "paper"] = Field(
        "paper",
        description="bert4rec: where weights start. identity: attention's values, their mixture "
        "and the head so, [MASK] and positions at zero; near: values so, and attention begins with "
        "near items; paper: all at random (normal, 0.02)",
    )
    bias_init: Literal["popularity", "zero"] = Field(
        "zero",
        description="where the bias of each item's score starts (bert4rec, caser, cdae, gru4rec). "
        "popularity: at the logarithm of how often the item occurs, so that item vectors need not "
        "learn that first",
    )
    sees: Literal["both-sides", "before"] = Field(
        "both-sides",
        description="bert4rec: which others an item sees; `before` is no longer the paper's model",
    )
    positions: bool = Field(True, description="bert4rec: position embeddings")
    feed_forward: bool = Field(True, description="bert4rec: the feed-forward half of every block")
    layer_norm: bool = Field(True, description="bert4rec: LayerNorm in the blocks (Eq. 5)")
    residual: bool = Field(True, description="bert4rec: residual connections in the blocks (Eq. 5)")
    neighbours: Positive = Field(100, description="item-knn: how many similar items an item has")
    similarity: Literal["cosine", "tfidf", "bm25"] = Field(
        "cosine", description="item-knn: how the users of two items are compared"
    )

    window: Positive = Field(5, description="caser: how many of the last items are read")
    horizontal_filters: Positive = Field(16, description="caser: filters of each height")
    vertical_filters: Positive = Field(4, description="caser: weighted sums of the items read")

    @property
    def last_dropout(self) -> float:
        return self.dropout if self.output_dropout is None else self.output_dropout

    @model_validator(mode="after")
    def _gain_has_a_norm(self) -> Self:
        if self.name == "bert4rec" and self.head_gain != 1 and not self.head_norm:
            raise ValueError("head_gain needs head_norm = true: it is where that norm starts")
        return self

    @model_validator(mode="after")
    def _near_has_places(self) -> Self:
        if self.name != "bert4rec" or self.init != "near":
            return self
        if not self.positions:
            raise ValueError("init = near needs positions = true: it is what they start with")
        if self.dim < 4 * self.heads:
            raise ValueError(
                f"init = near needs heads of 4 numbers or more, of which items have 1: "
                f"dim = {self.dim} is less than 4 times heads = {self.heads}"
            )
        return self

    @model_validator(mode="after")
    def _heads_divide_dim(self) -> Self:
        if self.name in ATTENTION_MODELS and self.dim % self.heads:
            raise ValueError(f"heads = {self.heads} does not divide dim = {self.dim}")
        return self


class TrainingConfig(Settings):
    seed: Count = Field(0, description="fixes everything that is random, data order included")
    batch_size: Positive = Field(128, description="sequences a step, of all processes together")
    epochs: Positive = Field(200, description="most passes over the training sequences")
    steps: Positive | None = Field(
        None, description="most steps of the first stage, where that is less than its epochs"
    )
    minutes: Annotated[float, Field(gt=0)] | None = Field(
        None, description="stop at the end of the epoch in which this much time of the loop is over"
    )
    learning_rate: Annotated[float, Field(gt=0)] = Field(
        1e-3, description="the highest one, after the warm-up; it decays linearly to zero"
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.01, description="AdamW's decay; never on biases and LayerNorm"
    )
    warmup_steps: Count = Field(100, description="steps of linear warm-up")
    clip_norm: Annotated[float, Field(gt=0)] = Field(
        5.0, description="longest gradient; longer ones are scaled down to it"
    )
    loss: Literal[
        "auto",
        "cross-entropy",
        "sampled-softmax",
        "in-batch",
        "bce",
        "gbce",
        "bpr",
        "top1",
        "top1-max",
        "bpr-max",
    ] = Field(
        "cross-entropy",
        description="what is minimised: cross-entropy over all items; all others draw negatives. "
        "auto is cross-entropy, and from 20,000 items on sampled-softmax with 2,048 popularity "
        "negatives; for bert4rec it makes a head_gain of 1 one of 4 from 10,000 items on",
    )
    loss_memory_mb: Positive = Field(
        64, description="most memory a worker takes for logits of cross-entropy, in MiB"
    )
    n_negatives: Positive = Field(
        1024, description="negatives of a sampled loss; from 64 on, shared by a piece of the batch"
    )
    negatives: Literal["uniform", "popularity", "in-batch"] = Field(
        "uniform",
        description="how the negatives of a sampled loss are drawn; in-batch takes the targets of "
        "n_negatives other positions of the batch",
    )
    negatives_power: Share = Field(
        1.0, description="popularity negatives come in proportion to popularity ** this"
    )
    bpr_max_penalty: Annotated[float, Field(ge=0)] = Field(
        1.0, description="weight of the squared scores of negatives in bpr-max"
    )
    gbce_calibration: Share = Field(0.75, description="t of gbce: 0 is bce, 1 fully calibrated")
    mask_ratio: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="rho: the share of items that is hidden in the Cloze task"
    )
    max_masked: Positive | None = Field(
        None, description="ask about at most this many items a sequence; in the Cloze task, hide"
    )
    n_targets: Positive = Field(
        1, description="of the next-item task: how many following items are asked about"
    )
    replacement: Literal["mask", "80/10/10"] = Field(
        "mask", description="what stands in for a hidden item: always [MASK], or BERT's mixture"
    )
    last_item_share: Share = Field(
        0.1, description="share of the sequences in which only the last item is hidden (Cloze task)"
    )
    next_item_share: Share = Field(
        0.0,
        description="bert4rec: share of the sequences without the Cloze task, in which a [MASK] "
        "after every item asks for the next one and sees the items before it",
    )
    on_validation: bool = Field(
        False,
        description="train on the validation items too, for the epochs given: nothing is left to "
        "choose them by",
    )
    window_step: Annotated[float, Field(gt=0, le=1)] | None = Field(
        0.5,
        description="slide over histories longer than max_len in steps of this share of it; "
        "none reads only the last max_len items",
    )
    validate_every: Positive = Field(2, description="epochs between two validations")
    validation_users: Positive | None = Field(
        2000, description="users in a validation during training, drawn once; none asks all"
    )
    patience: Positive | None = Field(
        15,
        description="stop after this many validations without a better NDCG@10; none never stops",
    )
    workers: Positive | None = Field(
        None, description="threads that share the cores; none is one a core, at most 8"
    )
    shards: Positive | None = Field(
        None,
        description="parts that the users are dealt into, each trained by one process at a time; "
        "none is one a process. Batches and masks depend on it, and not on the processes",
    )
    keep_stages: bool = Field(
        False,
        description="keep the best weights at the end of each stage as STAGE.safetensors beside "
        "the model",
    )
    shard_items: bool = Field(
        False,
        description="deal the item vectors out over the processes, for tables too large for one; "
        "needs a sampled loss",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(
        "auto", description="where to train: auto takes a GPU when there is one"
    )
    precision: Literal["auto", "float32", "bf16"] = Field(
        "auto", description="auto is bf16 on CUDA and float32 elsewhere; bf16 on a CPU is probed"
    )
    compile: bool = Field(
        False, description="torch.compile the feed-forward nets: needs a C++ compiler"
    )
    checkpoint_minutes: Annotated[float, Field(ge=0)] = Field(
        2.0, description="save a checkpoint at least this often (at every validation in any case)"
    )


class SecondStageConfig(Settings):
    """Asks for the end of random prefixes: what the model is asked when it recommends.

    For models of the Cloze task; the others are asked so from the start.
    """

    epochs: Count = Field(60, description="most passes of the last-item stage; 0 leaves it out")
    learning_rate: Annotated[float, Field(gt=0)] = Field(3e-4, description="as in training")
    warmup_steps: Count = Field(100, description="as in training")
    asks: Literal["end", "every-item"] = Field(
        "end",
        description="hide the end of one prefix a sequence; or put a [MASK] after every item from "
        "a random one on, each of which sees its own prefix only: more questions in a pass",
    )
    prefix_share: Share = Field(
        0.9,
        description="asks = end: share of the sequences cut at a random place, not at their end",
    )
    patience: Positive | None = Field(
        10,
        description="stop after this many validations without a better NDCG@10; none never stops",
    )


class EvaluationConfig(Settings):
    ks: Annotated[tuple[Positive, ...], Field(min_length=1)] = Field(
        (1, 5, 10, 20), description="cut-offs of the metrics"
    )
    exclude_seen: bool = Field(True, description="never recommend what the history holds already")
    n_negatives: Positive = Field(100, description="negatives of the two sampled protocols")
    seed: Count = Field(0, description="fixes the sampled negatives and the bootstrap")
    bootstrap: Count = Field(1000, description="resamples behind the 95 % intervals")
    users: Positive | None = Field(
        None, description="users in the final evaluation, drawn once by the seed; none asks all"
    )


CLOZE_ONLY = {"mask_ratio", "replacement", "last_item_share"}  # of `training`
CHOSEN_BY_AUTO = {"n_negatives", "negatives", "negatives_power"}


class Config(Settings):
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    second_stage: SecondStageConfig = SecondStageConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _validation_is_one_item(self) -> Self:
        if self.training.on_validation and self.data.split != "leave-one-out":
            raise ValueError("training.on_validation needs data.split = leave-one-out")
        return self

    @model_validator(mode="after")
    def _prefixes_fit(self) -> Self:
        if self.model.name != "bert4rec":
            return self
        stage = self.second_stage
        asks_every_item = stage.epochs > 0 and stage.asks == "every-item"
        if self.model.attention_dropout and (self.training.next_item_share or asks_every_item):
            raise ValueError(
                "model.attention_dropout does not go with training.next_item_share and "
                "second_stage.asks = every-item: set model.attention_dropout to 0"
            )
        if self.model.sees == "before" and self.training.next_item_share != 1:
            raise ValueError(
                "model.sees = before needs training.next_item_share = 1: the Cloze task hides "
                "items that are to be guessed from both sides"
            )
        return self

    def of_model(self, name: str) -> Config:
        """The same settings with another model, for one that has none of its own."""
        return self.model_copy(update={"model": self.model.model_copy(update={"name": name})})


def recipe_names() -> list[str]:
    folder = resources.files("bert4rec") / "recipes"
    return sorted(
        Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".toml")
    )


def recipe_text(name: str) -> str:
    if name not in recipe_names():
        raise ValueError(
            f"no recipe is named {name!r}{_nearest(name, recipe_names())}; "
            f"there are: {', '.join(recipe_names())}"
        )
    return (resources.files("bert4rec") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")


def setting_descriptions() -> list[tuple[str, str, str]]:
    """(section.key, default, meaning) of every setting."""
    return [
        (f"{section}.{key}", str(field.get_default()), field.description or "")
        for section, model in _sections().items()
        for key, field in model.model_fields.items()
    ]


def load_config(
    recipe: str = "default", file: str | Path | None = None, overrides: Iterable[str] = ()
) -> Config:
    """The recipe's settings, the file's on top of them, and `section.key=value` on top of both."""
    values = tomllib.loads(recipe_text(recipe))
    if file is not None:
        values = _merged(values, _read_toml(Path(file)))
    asked: dict[str, Any] = {}
    for override in overrides:
        asked = _merged(asked, _parse_override(override))
    where = f"recipe {recipe!r}" if file is None else str(file)
    config = parse_config(_merged(values, asked), where)
    _check_that_it_matters(config, asked)
    return config


def _check_that_it_matters(config: Config, asked: dict[str, Any]) -> None:
    """A setting that does nothing, given by hand, is a mistake."""
    by_hand = asked.get("training", {}).keys()
    if config.training.loss == "auto" and (idle := sorted(CHOSEN_BY_AUTO & by_hand)):
        raise ValueError(
            f"--set training.{idle[0]}: has no effect, as training.loss = auto chooses the "
            "negatives. Name the loss, as --set training.loss=sampled-softmax"
        )
    if config.model.name != "bert4rec" or config.training.next_item_share != 1:
        return
    if idle := sorted(CLOZE_ONLY & by_hand):
        raise ValueError(
            f"--set training.{idle[0]}: has no effect, as training.next_item_share = 1 leaves the "
            "Cloze task out. Choose a recipe with it, as --recipe bert4rec-2-stage"
        )


def override_config(config: Config, overrides: Iterable[str]) -> Config:
    """A copy of `config` with `section.key=value` on top."""
    values = config.model_dump()
    for override in overrides:
        values = _merged(values, _parse_override(override))
    return parse_config(values, "--set")


def parse_config(values: dict[str, Any], where: str) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{where}: " + "; ".join(_explain(e) for e in error.errors())) from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a TOML file ({error})") from None


def _parse_override(override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    sections = key.strip().split(".")
    if not equals or not all(sections):
        raise ValueError(f"--set {override!r}: write section.key=value, as in training.epochs=20")
    try:
        value: Any = json.loads(text)
    except json.JSONDecodeError:
        value = text.strip()  # a bare word is a string, so that nobody has to quote for the shell
    if len(sections) == 1:
        sections = [_section_of(sections[0]), sections[0]]
    for section in reversed(sections):
        value = {section: value}
    settings: dict[str, Any] = value
    return settings


def _section_of(key: str) -> str:
    """`epochs` alone means `training.epochs`: training comes first, then the only owner."""
    owners = [name for name, section in _sections().items() if key in section.model_fields]
    if "training" in owners:
        return "training"
    if len(owners) != 1:
        known = {k for section in _sections().values() for k in section.model_fields}
        raise ValueError(
            f"--set {key}: no setting has that name{_nearest(key, known)}; write section.key=value"
        )
    return owners[0]


def _sections() -> dict[str, type[Settings]]:
    return {name: field.annotation for name, field in Config.model_fields.items()}  # type: ignore[misc]


def _merged(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    both = base | top
    for key in base.keys() & top.keys():
        if isinstance(base[key], dict) and isinstance(top[key], dict):
            both[key] = _merged(base[key], top[key])
    return both


def _explain(error: Any) -> str:
    place = [str(part) for part in error["loc"]]
    name = ".".join(place)
    if error["type"] == "extra_forbidden":
        section = _sections().get(place[0]) if len(place) > 1 else Config
        known = list(section.model_fields) if section else list(Config.model_fields)
        return (
            f"unknown setting {name!r}{_nearest(place[-1], known)}; there are: {', '.join(known)}"
        )
    if error["type"] == "value_error":
        return f"{name}: {error['ctx']['error']}"
    return f"{name} = {error['input']!r}: {error['msg']}"


def _nearest(word: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(word, known, 1, 0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
