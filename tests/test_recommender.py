"""Raw ids in and out, whatever they are; and models on disk that can be trusted or are refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from toys import quiet, random_histories, small_config, untrained_recommender

from bert4rec.data.splits import leave_one_out
from bert4rec.durable import write_manifest
from bert4rec.pipeline import train_recommender
from bert4rec.recommender import RecommendationRequest, Recommender
from bert4rec.scoring import score_rows

N_ITEMS = 30
RECOMMENDER = untrained_recommender(N_ITEMS)
KNOWN = st.sampled_from([f"item-{i}" for i in range(N_ITEMS)])
ANYTHING = st.one_of(KNOWN, st.text(), st.integers(), st.floats(), st.none(), st.booleans(), st.just("[MASK]"))


@settings(deadline=None)
@given(
    history=st.lists(ANYTHING, max_size=40),
    k=st.integers(1, 50),
    exclude_seen=st.booleans(),
    allow=st.one_of(st.none(), st.lists(ANYTHING, max_size=20)),
    block=st.one_of(st.none(), st.lists(ANYTHING, max_size=20)),
)
def test_any_history_gives_exactly_what_is_available(
    history: list[object], k: int, exclude_seen: bool, allow: list[object] | None, block: list[object] | None
) -> None:
    found = RECOMMENDER.recommend(history, k, exclude_seen, allow, block)
    names = {f"item-{i}" for i in range(N_ITEMS)}
    seen = {raw for raw in history if isinstance(raw, str) and raw in names}
    available = set(names)
    if exclude_seen:
        available -= seen
    if allow is not None:
        available &= {raw for raw in allow if isinstance(raw, str)}
    if block is not None:
        available -= {raw for raw in block if isinstance(raw, str)}
    items = [each.item for each in found]
    assert len(items) == min(k, len(available))
    assert len(set(items)) == len(items)
    assert set(items) <= available
    assert all(math.isfinite(each.score) and 0 <= each.probability <= 1 for each in found)
    assert [each.score for each in found] == sorted((e.score for e in found), reverse=True)
    assert found.is_fallback == (not seen)
    assert len(found.unknown) == sum(not (isinstance(r, str) and r in names) for r in history)


def test_unknown_ids_change_nothing_but_the_list_of_them() -> None:
    clean = RECOMMENDER.recommend(["item-1", "item-2"])
    mixed = RECOMMENDER.recommend(["?", "item-1", 7, "item-2", "new"])
    assert mixed.items == clean.items
    assert mixed.unknown == ["?", 7, "new"]


def test_many_histories_equal_one_at_a_time_and_are_read_lazily() -> None:
    histories = [[f"item-{(i * j) % N_ITEMS}" for j in range(i % 20)] for i in range(600)]
    many = list(RECOMMENDER.recommend_many(histories, k=5))
    assert len(many) == 600
    for history, answer in list(zip(histories, many, strict=True))[::37]:
        alone = RECOMMENDER.recommend(history, k=5)
        assert [each.item for each in alone] == [each.item for each in answer]
        for a, b in zip(alone, answer, strict=True):
            assert a.score == pytest.approx(b.score, abs=1e-4)


def test_probabilities_over_the_whole_catalogue_sum_to_one() -> None:
    found = RECOMMENDER.recommend(["item-3"], k=N_ITEMS, exclude_seen=False)
    assert sum(each.probability for each in found) == pytest.approx(1, abs=1e-5)
    fallback = RECOMMENDER.recommend([], k=N_ITEMS)
    assert fallback.is_fallback
    assert sum(each.probability for each in fallback) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", ["popularity", "markov"])
def test_probabilities_of_counted_models_are_their_own(name: str, tmp_path: Path) -> None:
    sequences = random_histories(2)
    config = small_config(recipe=name)
    outcome = train_recommender(sequences, config, tmp_path / "model", console=quiet())
    counted = outcome.recommender
    found = counted.recommend(["item-3"], k=N_ITEMS, exclude_seen=False)
    assert sum(each.probability for each in found) == pytest.approx(1, abs=1e-5)
    if name == "popularity":
        counts = counted.model.state()["counts"].clamp(min=0.5)
        assert found.items[0].probability == pytest.approx(float(counts.max() / counts.sum()))


def test_bad_arguments_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="k is 0"):
        RECOMMENDER.recommend(["item-1"], k=0)
    with pytest.raises(ValueError, match="list of item ids"):
        RECOMMENDER.recommend("item-1")
    with pytest.raises(ValueError, match="k is -1"):
        RECOMMENDER.similar("item-1", k=-1)
    with pytest.raises(ValueError, match="'nothing' is not in the model's catalogue"):
        RECOMMENDER.similar("nothing")
    with pytest.raises(ValueError, match="nothing to explain"):
        RECOMMENDER.explain(["?"], "item-1")


def test_similar_is_the_cosine_of_the_item_embeddings() -> None:
    found = RECOMMENDER.similar("item-4", k=N_ITEMS)
    assert len(found) == N_ITEMS - 1
    assert "item-4" not in {each.item for each in found}
    model = RECOMMENDER.model
    vectors = model.item_vectors()  # type: ignore[attr-defined]
    best = RECOMMENDER.vocabulary.token(found[0].item)
    assert best is not None
    expected = torch.nn.functional.cosine_similarity(vectors[4], vectors[best], dim=0)
    assert found[0].score == pytest.approx(float(expected), abs=1e-5)


def test_influence_is_the_change_in_log_probability_without_the_item() -> None:
    history = ["item-1", "unknown", "item-2", "item-3"]
    explanation = RECOMMENDER.explain(history, "item-9")
    assert [each.item for each in explanation.influences] == ["item-1", "item-2", "item-3"]

    def log_probability(items: list[str]) -> float:
        found = RECOMMENDER.recommend(items, k=N_ITEMS, exclude_seen=False)
        return math.log(next(each.probability for each in found if each.item == "item-9"))

    expected = log_probability(["item-1", "item-2", "item-3"]) - log_probability(["item-1", "item-3"])
    assert explanation.influences[1].influence == pytest.approx(expected, abs=1e-3)
    assert explanation.attention is not None
    assert explanation.attention.shape == (2, 2, 4, 4)


@pytest.mark.parametrize("name", ["bert4rec", "markov"])  # the others: test_contract.py
def test_saved_and_loaded_scores_are_equal_bit_for_bit(name: str, tmp_path: Path) -> None:
    sequences = random_histories(2)
    stages = ["stages.0.epochs=1", "stages.1.epochs=0"] if name == "bert4rec" else []
    recipe = "bert4rec-2-stage" if name == "bert4rec" else name
    config = small_config(*stages, recipe=recipe)
    outcome = train_recommender(sequences, config, tmp_path / "model", console=quiet())
    saved = outcome.recommender
    loaded = Recommender.load(tmp_path / "model")
    users, history = torch.tensor([0, 1, 2]), torch.tensor([[1, 2, 3], [4, 30, 30], [30, 30, 30]])
    scores = [score_rows(each.model, users, history) for each in (saved, loaded)]
    assert torch.equal(*scores)
    assert loaded.config == saved.config
    assert loaded.vocabulary.ids == saved.vocabulary.ids
    assert loaded.vocabulary.titles == saved.vocabulary.titles
    assert loaded.about["data"]["fingerprint"] == sequences.fingerprint


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    RECOMMENDER.save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", ["model.safetensors", "items.parquet", "config.json", "about.json", "manifest.json"])
def test_truncated_and_flipped_files_are_refused_by_name(saved: Path, name: str) -> None:
    content = (saved / name).read_bytes()
    (saved / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        Recommender.load(saved)
    flipped = bytearray(content)
    flipped[len(flipped) // 2] ^= 4  # in the manifest, within a checksum or a name
    (saved / name).write_bytes(flipped)
    with pytest.raises(ValueError, match=r"is damaged|is missing"):
        Recommender.load(saved)
    (saved / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing|has no {name}"):
        Recommender.load(saved)


@pytest.mark.parametrize("content", ["[]", "{}", '{"files": {"a": {}}}', '{"files": 3}', "{"])
def test_a_manifest_of_another_shape_is_refused(saved: Path, content: str) -> None:
    (saved / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        Recommender.load(saved)


def test_a_model_with_values_that_are_not_numbers_is_refused(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    tensors["output_bias"][3] = float("nan")
    save_file(tensors, saved / "model.safetensors")
    write_manifest(saved, [path.name for path in saved.iterdir() if path.name != "manifest.json"])
    with pytest.raises(ValueError, match="output_bias holds values that are not numbers"):
        Recommender.load(saved)


def test_a_model_of_another_format_or_no_model_is_refused(saved: Path, tmp_path: Path) -> None:
    about = json.loads((saved / "about.json").read_text())
    (saved / "about.json").write_text(json.dumps(about | {"format_version": 99}))
    write_manifest(saved, [path.name for path in saved.iterdir() if path.name != "manifest.json"])
    with pytest.raises(ValueError, match="model format 99"):
        Recommender.load(saved)
    with pytest.raises(ValueError, match="not a directory"):
        Recommender.load(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"manifest\.json"):
        Recommender.load(tmp_path / "empty")


@pytest.mark.parametrize("k", [0, -1, True])
def test_ranking_arrays_refuses_a_bad_k_at_once(k: int) -> None:
    with pytest.raises(ValueError, match="k is"):
        RECOMMENDER.top_k(leave_one_out(random_histories(1)).test.histories, k)


def test_arrays_and_answers_are_the_same_in_order_and_for_empty_histories() -> None:
    histories = [["item-1", "item-2"], [], ["item-5"] * 30, ["item-3"], ["unknown"]]
    answers = list(RECOMMENDER.recommend_many(histories, k=4))
    assert [answer.is_fallback for answer in answers] == [False, True, False, False, True]
    for history, answer in zip(histories, answers, strict=True):
        alone = RECOMMENDER.recommend(history, k=4)
        assert [each.item for each in alone] == [each.item for each in answer]
        assert [each.probability for each in alone] == pytest.approx([each.probability for each in answer], rel=1e-4)


def test_requests_of_all_kinds_share_a_batch() -> None:
    recommender = untrained_recommender()
    kinds: list[dict[str, Any]] = [
        {"history": []},
        {"history": ["item-1"], "k": 3},
        {"history": ["item-1", "item-2", "unknown"], "k": 30, "exclude_seen": False},
        {"history": ["item-3"] * 20, "allow": ["item-3", "item-5", "item-6", "none"]},
        {"history": ["item-4"], "allow": []},
        {"history": ["item-4", "item-9"], "block": ["item-5", "item-6"], "allow": ["item-5"]},
        {"history": ["item-7", "item-8"], "block": ["item-5", "none"], "k": 29},
    ]
    together = recommender.answer_requests([RecommendationRequest(**kind) for kind in kinds])
    assert recommender.answer_requests([]) == []
    for kind, found in zip(kinds, together, strict=True):
        alone = recommender.recommend(**kind)
        assert [each.item for each in found] == [each.item for each in alone]
        assert [each.score for each in found] == pytest.approx([e.score for e in alone], abs=1e-5)
        assert (found.unknown, found.is_fallback) == (alone.unknown, alone.is_fallback)
        allowed, blocked = kind.get("allow"), kind.get("block", [])
        for each in found:
            assert allowed is None or each.item in allowed
            assert each.item not in blocked
            assert not kind.get("exclude_seen", True) or each.item not in kind["history"]


def test_many_items_are_explained_as_each_alone() -> None:
    recommender = untrained_recommender()
    history, items = ["item-1", "item-2", "item-3"], ["item-7", "item-8", "item-1"]
    for item, found in zip(items, recommender.explain_items(history, items), strict=True):
        alone = recommender.explain(history, item)
        assert found.item == alone.item == item
        assert found.probability == pytest.approx(alone.probability)
        influences = [each.influence for each in found.influences]
        assert influences == pytest.approx([each.influence for each in alone.influences], abs=1e-6)
    assert recommender.explain_items(history, items, with_attention=False)[0].attention is None


def test_popularity_of_the_same_catalogue() -> None:
    recommender = untrained_recommender()
    popular = recommender.by_popularity()
    assert popular.recommend([], 5).items == recommender.recommend([], 5).items
    assert "item-1" not in [found.item for found in popular.recommend(["item-1"], 30)]
