"""Recommending for the users of a data set: who is known, and who is unknown."""

import json
from pathlib import Path

import pytest
import torch
from scored import save
from toys import random_histories, sequences_of, small_config
from typer.testing import CliRunner

from bert4rec.cli import app
from bert4rec.data.sequences import Sequences
from bert4rec.distributed import user_rows
from bert4rec.distributed.batch_scoring import recommend_users
from bert4rec.distributed.user_rows import BatchRequest
from bert4rec.models import Model
from bert4rec.models.bpr_mf import BPRMF
from bert4rec.models.fpmc import FPMC
from bert4rec.models.neumf import NeuMF
from bert4rec.recommender import Recommender

N_ITEMS, N_USERS, DIM = 30, 17, 16
TRAINED_ON = random_histories(5, n_users=N_USERS, n_items=N_ITEMS)
OTHERS = random_histories(6, n_users=N_USERS, n_items=N_ITEMS)


@pytest.fixture(autouse=True)
def some_users_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the first user of a chunk is not always the first of all."""
    monkeypatch.setattr(user_rows, "CHUNK", 7)


def recommender_of(name: str) -> Recommender:
    """A model with random weights, as if it had been trained on `TRAINED_ON`."""
    torch.manual_seed(1)
    config = small_config(f"model.name={name}")
    model: Model
    if name == "bpr-mf":
        is_known = torch.ones(N_USERS, dtype=torch.bool)
        model = BPRMF(torch.randn(N_USERS, DIM + 1), torch.randn(N_ITEMS, DIM + 1), is_known)
    else:
        kind = {"neumf": NeuMF, "fpmc": FPMC}[name]
        model = kind(N_ITEMS, config.model, N_USERS).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
    about = {"data": {"fingerprint": TRAINED_ON.fingerprint}}
    return Recommender(model, TRAINED_ON.vocabulary, config, about)


def ranked_for(
    recommender: Recommender, sequences: Sequences, out: Path, *, exclude_seen: bool
) -> dict[str, list[str]]:
    """All items of each user, best first."""
    n_rows = recommend_users(recommender, sequences, out, BatchRequest(N_ITEMS, exclude_seen))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == n_rows
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["user"], []).append(row["item"])
        assert row["rank"] == len(found[row["user"]])
        assert not row["is_fallback"]
    return found


def history_of(sequences: Sequences, row: int) -> list[int]:
    tokens: list[int] = sequences.tokens[sequences.offsets[row] : sequences.offsets[row + 1]].tolist()
    return tokens


def in_order(scores: torch.Tensor, left_out: list[int]) -> list[str]:
    order = scores.argsort(descending=True).tolist()
    return [f"item-{item}" for item in order if item not in left_out]


def scores_by_hand(model: Model, user: int | None, history: list[int]) -> torch.Tensor:
    """The user's own vector with every item's; None is an unknown user."""
    with torch.no_grad():
        if isinstance(model, BPRMF):
            return model.item_factors @ model.user_factors[user]
        if isinstance(model, NeuMF):
            p = model.users.weight[user]
            q = model.item_embedding.weight
            pairs = torch.cat([p[DIM:].expand(N_ITEMS, -1), q[:, DIM:]], dim=1)
            first = torch.cat([model.user_layer.weight, model.item_layer.weight], dim=1)
            hidden = (pairs @ first.T + model.user_layer.bias).relu()
            tower = (hidden @ model.tower.weight.T + model.tower.bias).relu()
            both = torch.cat([p[:DIM] * q[:, :DIM], tower], dim=1)
            return both @ model.final.weight[0] + model.final.bias
        assert isinstance(model, FPMC)
        items = model.next_items.weight
        scores = items[:, DIM:] @ model.last_items.weight[history[-1]]
        return scores if user is None else scores + items[:, :DIM] @ model.users.weight[user]


@pytest.mark.parametrize("exclude_seen", [False, True])
@pytest.mark.parametrize("name", ["bpr-mf", "neumf", "fpmc"])
def test_on_the_training_data_a_row_is_the_user_of_that_row(name: str, exclude_seen: bool, tmp_path: Path) -> None:
    recommender = recommender_of(name)
    out = tmp_path / "out.jsonl"
    found = ranked_for(recommender, TRAINED_ON, out, exclude_seen=exclude_seen)
    assert list(found) == TRAINED_ON.user_ids
    for row, user in enumerate(TRAINED_ON.user_ids):
        history = history_of(TRAINED_ON, row)
        scores = scores_by_hand(recommender.model, row, history)
        assert found[user] == in_order(scores, history if exclude_seen else [])


@pytest.mark.parametrize("name", ["bpr-mf", "neumf"])
def test_a_model_of_users_is_refused_for_other_data(name: str, tmp_path: Path) -> None:
    recommender = recommender_of(name)
    out = tmp_path / "out.jsonl"
    with pytest.raises(ValueError, match=f"{name} knows only the users that it was trained on"):
        recommend_users(recommender, OTHERS, out)
    assert list(tmp_path.iterdir()) == []  # and leaves nothing behind


def test_a_model_that_reads_histories_leaves_out_the_vector_of_an_unknown_user(tmp_path: Path) -> None:
    recommender = recommender_of("fpmc")
    found = ranked_for(recommender, OTHERS, tmp_path / "out.jsonl", exclude_seen=False)
    assert OTHERS.user_ids == TRAINED_ON.user_ids  # names do not make them the same people
    for row, user in enumerate(OTHERS.user_ids):
        history = history_of(OTHERS, row)
        assert found[user] == in_order(scores_by_hand(recommender.model, None, history), [])


def test_a_user_who_does_more_makes_all_of_them_unknown(tmp_path: Path) -> None:
    """Rows may have moved in data that has grown, so none is taken for a row of before."""
    histories = [history_of(TRAINED_ON, row) for row in range(N_USERS)]
    grown = sequences_of([*histories[:-1], [*histories[-1], 3]], N_ITEMS)
    recommender = recommender_of("fpmc")
    found = ranked_for(recommender, grown, tmp_path / "out.jsonl", exclude_seen=False)
    expected = in_order(scores_by_hand(recommender.model, None, histories[0]), [])
    assert found["user-0"] == expected


def test_similar_and_explain_take_the_model_and_then_the_item(tmp_path: Path) -> None:
    saved = save(tmp_path, N_USERS)
    for words, named in (
        (["similar", saved.model, "item-3", "--k", "2"], "cosine"),
        (["explain", saved.model, "item-3", "--history", "item-1,item-2"], "influence"),
    ):
        done = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert named in done.output
