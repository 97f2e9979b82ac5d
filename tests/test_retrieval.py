"""Large catalogues: exact search in blocks, an index, and masks that hide what they say."""

import json
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from toys import sequences_of, small_config, untrained_recommender
from typer.testing import CliRunner

from bert4rec import model_directory, scoring
from bert4rec.cli import app
from bert4rec.data.splits import Spans, leave_one_out
from bert4rec.durable import verify_manifest, write_manifest
from bert4rec.item_mask import ExcludedItems, ItemMask
from bert4rec.models.output import DotProduct, QuantizedDotProduct
from bert4rec.models.quantized_embedding import int8_embedding
from bert4rec.recommender import Recommender
from bert4rec.retrieval.index_builder import build_index, encode_sample
from bert4rec.retrieval.item_index import note_missing_faiss
from bert4rec.scoring import (
    Request,
    answer_requests,
    dot_product_of,
    log_probabilities,
    score_blocks,
    score_rows,
    top_k,
)
from bert4rec.serving.model_registry import load_model
from bert4rec.training.setup import build_model

N_ITEMS, N_GROUPS, DIM = 6_000, 40, 16


def histories_of(n: int, seed: int = 1) -> Spans:
    """People who stay within a group of items, so that an index has something to find."""
    generator = np.random.default_rng(seed)
    groups = generator.integers(0, N_GROUPS, n)
    rows = [
        (generator.integers(0, N_ITEMS // N_GROUPS, 3 + i % 9) * N_GROUPS + group).tolist()
        for i, group in enumerate(groups)
    ]
    sequences = sequences_of(rows, N_ITEMS)
    ends = sequences.offsets[1:]
    return Spans(sequences.tokens, sequences.offsets[:-1], ends, np.full(n, -1))


def grouped_recommender() -> Recommender:
    """Item i is of group i % 40; long and short vectors, and a bias that matters."""
    recommender = untrained_recommender(N_ITEMS, spread=0.1)
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(N_GROUPS, DIM, generator=generator)
    groups = torch.arange(N_ITEMS) % N_GROUPS
    noise = 0.5 * torch.randn(N_ITEMS, DIM, generator=generator)
    lengths = 0.5 + torch.rand(N_ITEMS, 1, generator=generator)
    model = recommender.model
    assert isinstance(model, torch.nn.Module)
    with torch.no_grad():
        model.item_embedding.weight[:N_ITEMS] = (centres[groups] + noise) * lengths  # type: ignore
        model.output_bias[:] = 0.5 * torch.randn(N_ITEMS, generator=generator)  # type: ignore
        model.output_norm.weight.fill_(1)  # type: ignore
        model.output_projection.weight += torch.eye(DIM)  # type: ignore
    return recommender


EXACT = grouped_recommender()
INDEXED = Recommender(EXACT.model, EXACT.vocabulary, EXACT.config, EXACT.about)
MEASURED = INDEXED.build_index(histories_of(400), recall=0.97)


def recall_of(found: list[list[int]], wanted: list[list[int]]) -> float:
    pairs = zip(found, wanted, strict=True)
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in pairs]))


# Exact search


@pytest.mark.parametrize("n_rows", [1, 3])
def test_blocks_find_what_whole_rows_find(n_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items, scores and probabilities, whatever the mask, against a plain softmax and sort."""
    monkeypatch.setattr(scoring, "FEWEST_ITEMS", 7)
    monkeypatch.setattr(scoring, "MOST_ITEMS", 11)
    monkeypatch.setattr(scoring, "ITEMS_PER_BEST", 1)
    n_items, k = 64, 5
    model = untrained_recommender(n_items).model
    output = dot_product_of(model)
    assert output is not None
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        h = torch.randn(n_rows, DIM, generator=generator)
        assert len(list(score_blocks(output, h, k))) > 4
        scores = output.block_scores(h, 0, n_items).detach()
        places = torch.randint(0, scores.numel(), (30,), generator=generator)
        excluded = torch.rand(n_items, generator=generator) < 0.2
        allowed = {n_rows - 1: torch.randperm(n_items, generator=generator)[:20]}
        best = top_k(score_blocks(output, h, k), ItemMask(n_items, places, ExcludedItems(excluded), allowed), k)
        may = torch.ones_like(scores, dtype=torch.bool)
        may.view(-1)[places] = False
        may[:, excluded] = False
        may[n_rows - 1] &= torch.isin(torch.arange(n_items), allowed[n_rows - 1])
        wanted = scores.masked_fill(~may, -torch.inf).topk(k)
        assert torch.equal(best.items[wanted.values > -torch.inf], wanted.indices[wanted.values > -torch.inf])
        torch.testing.assert_close(best.scores, wanted.values)
        torch.testing.assert_close(best.log_total[:, 0], scores.logsumexp(1))
        some = torch.tensor([63, 0, 31, 31])
        torch.testing.assert_close(log_probabilities(score_blocks(output, h), some), scores.log_softmax(1)[:, some])


def test_a_search_in_blocks_holds_no_row_of_all_scores() -> None:
    """The law that memory is bounded, whatever the catalogue: a whole row is never made."""
    output = DotProduct(torch.randn(300_000, 2), torch.zeros(300_000))
    for n_rows in (1, 16, 256):
        sizes = [scores.numel() for _, scores in score_blocks(output, torch.zeros(n_rows, 2), 10)]
        assert max(sizes) <= 2**20
        assert sum(sizes) == n_rows * 300_000


def test_quantized_embeddings_are_searched_in_blocks_and_by_an_index() -> None:
    plain = dot_product_of(EXACT.model)
    assert isinstance(plain, DotProduct)
    output = QuantizedDotProduct(int8_embedding(plain.weight.detach(), N_ITEMS), plain.bias.detach())
    sample = encode_sample(EXACT.model, histories_of(100))
    wanted = output.block_scores(sample.h, 0, N_ITEMS)
    wanted.view(-1)[sample.mask.hidden] = -torch.inf
    found = top_k(score_blocks(output, sample.h, 10), sample.mask, 10)
    torch.testing.assert_close(found.scores, wanted.topk(10).values)
    index = build_index(output, sample, 0.95)
    assert index is not None
    by_index = index.top_k(sample.h, output, sample.mask, 10)
    assert recall_of(by_index.items.tolist(), found.items.tolist()) > 0.9
    torch.testing.assert_close(by_index.scores, wanted.gather(1, by_index.items))


def test_a_model_without_products_is_scored_as_a_whole() -> None:
    model = build_model(small_config(recipe="neumf"), 30, n_users=4)
    assert dot_product_of(model) is None
    users, histories = torch.tensor([2]), torch.tensor([[1, 2]])
    with torch.inference_mode():
        [(first, block)] = score_blocks(model.output_layer(), model.encode(users, histories))
    assert first == 0
    assert torch.equal(block, score_rows(model, users, histories))


# The index


def test_the_index_has_the_recall_it_says_on_people_it_was_not_tuned_on() -> None:
    assert MEASURED is not None
    assert MEASURED.recall >= 0.95
    assert (MEASURED.n_tuned, MEASURED.n_measured) == (200, 200)
    others = histories_of(300, seed=7)
    found, wanted = (next(r.top_k(others)).items.tolist() for r in (INDEXED, EXACT))
    assert recall_of(found, wanted) == pytest.approx(MEASURED.recall, abs=0.03)
    assert MEASURED.n_searched < MEASURED.n_lists / 4  # and it is no disguised search of all


def test_a_higher_recall_searches_more_lists_and_an_impossible_one_builds_nothing() -> None:
    recommender = Recommender(EXACT.model, EXACT.vocabulary, EXACT.config, EXACT.about)
    low = recommender.build_index(histories_of(100), recall=0.3)
    assert low is not None
    assert MEASURED is not None
    assert low.n_searched < MEASURED.n_searched
    noise = untrained_recommender(2_000, seed=5)  # no two vectors have anything in common
    assert noise.build_index(histories_within(2_000), recall=1.0) is None
    assert noise.index is None
    assert len(noise.recommend(["item-1"])) == 10


def histories_within(n_items: int) -> Spans:
    rows = np.random.default_rng(2).integers(0, n_items, (60, 4)).tolist()
    sequences = sequences_of(rows, n_items)
    return Spans(sequences.tokens, sequences.offsets[:-1], sequences.offsets[1:], np.full(60, -1))


ITEM = st.integers(0, N_ITEMS - 1)


@settings(deadline=None, max_examples=40)
@given(
    history=st.lists(ITEM, min_size=1, max_size=12),
    k=st.sampled_from([1, 10, 40, 3_000]),
    exclude_seen=st.booleans(),
    n_allowed=st.sampled_from([None, 0, 1, 7, 500, 5_000]),
    n_blocked=st.sampled_from([0, 3, 900, 5_990]),
    blocks_the_best=st.booleans(),
    seed=st.integers(0, 5),
)
@example([1, 41], 10, True, None, 5_980, True, 0)  # all that the index finds is blocked
@example([1, 41], 10, True, None, 900, True, 0)
def test_no_excluded_item_is_ever_found_and_no_answer_is_short(
    history: list[int],
    k: int,
    exclude_seen: bool,
    n_allowed: int | None,
    n_blocked: int,
    blocks_the_best: bool,
    seed: int,
) -> None:
    generator = np.random.default_rng(seed)
    everything = Request(history, N_ITEMS, False)
    [whole] = answer_requests(EXACT.model, EXACT.model, [everything])
    order = whole.items[0] if blocks_the_best else generator.permutation(N_ITEMS)
    blocked = order[:n_blocked].tolist()
    allowed = None if n_allowed is None else generator.permutation(N_ITEMS)[:n_allowed].tolist()
    request = Request(history, k, exclude_seen, allowed, blocked)
    other = Request([1, 2, 3], 3)
    for requests in ([request], [other, request]):  # alone and in a batch
        found = answer_requests(INDEXED.model, INDEXED.model, requests, INDEXED.index)[-1]
        items = found.items[0].tolist()
        remaining = set(range(N_ITEMS)) if allowed is None else set(allowed)
        remaining -= set(blocked) | (set(history) if exclude_seen else set())
        assert set(items) <= remaining
        assert len(items) == len(set(items)) == min(k, len(remaining)) == found.n_found[0]
        of = dict(zip(whole.items[0].tolist(), whole.scores[0].tolist(), strict=True))
        assert found.scores[0].tolist() == pytest.approx([of[i] for i in items], abs=1e-4)
        assert found.scores[0].tolist() == sorted(found.scores[0].tolist(), reverse=True)
        if allowed is not None or n_blocked >= 5_980:  # these are exact
            best = sorted(remaining, key=lambda i: -of[i])[: len(items)]
            assert [of[i] for i in items] == pytest.approx([of[i] for i in best], abs=1e-4)


@pytest.mark.parametrize("share", [0.001, 0.1, 0.4, 0.9])
def test_many_histories_with_the_same_excluded_items(share: float) -> None:
    excluded = torch.rand(N_ITEMS, generator=torch.Generator().manual_seed(4)) >= share
    histories = histories_of(120, seed=9)
    [found] = INDEXED.top_k(histories, excluded=excluded)
    [wanted] = EXACT.top_k(histories, excluded=excluded)
    assert np.array_equal(found.n_found, wanted.n_found)
    for row, n in enumerate(found.n_found.tolist()):
        items = found.items[row, :n]
        assert not excluded[items].any()
        assert not set(items.tolist()) & set(histories[row].tolist())
    n = int(wanted.n_found.min())
    assert recall_of(found.items[:, :n].tolist(), wanted.items[:, :n].tolist()) > 0.94


def test_blocking_each_rows_best_costs_no_recall() -> None:
    """The answer then lies as deep as that of k = 110: as many lists are searched."""
    histories = histories_of(60, seed=5)
    rows = [histories[i].tolist() for i in range(60)]
    whole = answer_requests(EXACT.model, EXACT.model, [Request(row, 100) for row in rows])
    requests = [Request(row, 10, blocked=best.items[0].tolist()) for row, best in zip(rows, whole, strict=True)]
    found, wanted = (
        [each.items[0].tolist() for each in answer_requests(r.model, r.model, requests, r.index)]
        for r in (INDEXED, EXACT)
    )
    assert recall_of(found, wanted) >= 0.9


def test_items_that_nobody_would_have_been_given_cost_nothing() -> None:
    """Long lists of blocked items are no reason to leave the index aside."""
    history = list(range(1, 400, 40))
    [whole] = answer_requests(EXACT.model, EXACT.model, [Request(history, N_ITEMS, False)])
    blocked = whole.items[0][-2_000:].tolist()
    [found] = answer_requests(INDEXED.model, INDEXED.model, [Request(history, 10, blocked=blocked)], INDEXED.index)
    assert np.isnan(found.probabilities).all()  # by the index


@pytest.mark.parametrize("n_blocked", [10, 100, 1_000])
def test_blocking_the_best_for_everybody_costs_no_recall(n_blocked: int) -> None:
    """And a few are no reason to leave the index aside."""
    histories = histories_of(120, seed=9)
    best = next(EXACT.top_k(histories, 100, exclude_seen=False)).items[:, : max(10, n_blocked // 10)]
    often = np.bincount(best.ravel(), minlength=N_ITEMS).argsort()[::-1][:n_blocked]
    excluded = torch.zeros(N_ITEMS, dtype=torch.bool)
    excluded[often.copy()] = True
    [found], [wanted] = (r.top_k(histories, exclude_seen=False, excluded=excluded) for r in (INDEXED, EXACT))
    assert n_blocked > 10 or np.isnan(found.probabilities).mean() > 0.9
    assert not excluded[found.items].any()
    assert recall_of(found.items.tolist(), wanted.items.tolist()) > 0.9


def test_one_who_blocks_many_does_not_make_the_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    assert INDEXED.index is not None
    candidates, fetched = INDEXED.index.candidates, []

    def noted(h: torch.Tensor, n: int, n_searched: int) -> torch.Tensor:
        fetched.extend([n] * len(h))
        return candidates(h, n, n_searched)

    monkeypatch.setattr(INDEXED.index, "candidates", noted)
    few = [Request([i, i + 40], 10, False) for i in range(8)]
    many = Request([9, 49], 10, False, blocked=list(range(3, 2_000)))
    answer_requests(INDEXED.model, INDEXED.model, [*few, many], INDEXED.index)
    assert sum(n > 10 for n in fetched[:9]) == 1


def test_probabilities_are_known_where_all_items_were_looked_at() -> None:
    by_index = INDEXED.recommend(["item-1", "item-41"])
    exactly = EXACT.recommend(["item-1", "item-41"])
    assert all(np.isnan(each.probability) for each in by_index)
    assert all(0 < each.probability < 1 for each in exactly)
    assert all(0 < each.probability < 1 for each in INDEXED.recommend([]))  # the most popular
    for k in (10, 4_000):  # so many items are searched for exactly
        assert len(INDEXED.recommend(["item-1"], k)) == k
    assert INDEXED.recommend(["item-1"], 4_000).items[0].probability > 0


def test_threads_that_search_at_once_find_the_same() -> None:
    histories = [[f"item-{i}", f"item-{i + 40}"] for i in range(48)]
    alone = [[each.item for each in INDEXED.recommend(history)] for history in histories]
    with ThreadPoolExecutor(4) as pool:
        together = pool.map(lambda h: [each.item for each in INDEXED.recommend(h)], histories * 3)
        assert list(together) == alone * 3


# On disk


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    INDEXED.save(tmp_path / "model")
    return tmp_path / "model"


def index_files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("index-*"))


def test_a_saved_index_answers_the_same_and_can_be_left_aside(saved: Path) -> None:
    loaded = Recommender.load(saved)
    assert loaded.index is not None
    assert loaded.index.quality == MEASURED
    history = ["item-5", "item-45"]
    wanted = [(each.item, each.score) for each in INDEXED.recommend(history)]
    assert [(each.item, each.score) for each in loaded.recommend(history)] == wanted
    exactly = Recommender.load(saved, retrieval="exact")
    assert exactly.index is None
    assert exactly.recommend(history).items == EXACT.recommend(history).items
    with pytest.raises(ValueError, match="retrieval is 'quick'"):
        Recommender.load(saved, retrieval="quick")  # type: ignore[arg-type]


def test_a_new_index_takes_the_place_of_the_old_and_none_takes_it_away(saved: Path) -> None:
    before = index_files(saved)
    assert len(before) == 2
    recommender = Recommender.load(saved)
    recommender.build_index(histories_of(60), recall=0.5)
    recommender.save_index(saved)
    after = index_files(saved)
    assert len(after) == 2
    assert after != before
    assert set(after) < set(json.loads((saved / "manifest.json").read_text())["files"])
    EXACT.save_index(saved)
    assert not index_files(saved)
    assert Recommender.load(saved).index is None


def test_a_damaged_or_foreign_index_is_refused(saved: Path) -> None:
    [facts, tables] = [saved / name for name in index_files(saved)]
    content = tables.read_bytes()
    flipped = bytearray(content)
    flipped[-1] ^= 1
    tables.write_bytes(flipped)
    with pytest.raises(ValueError, match=rf"{tables.name} is damaged"):
        Recommender.load(saved)
    tensors = {name: tensor.clone() for name, tensor in load_file_of(content, saved).items()}
    for name, bad in {
        "lists": torch.full((N_ITEMS,), 10**6, dtype=torch.int32),
        "centroids": torch.full_like(tensors["centroids"], torch.nan),
    }.items():
        save_file(tensors | {name: bad}, tables)
        vouch(saved)
        with pytest.raises(ValueError, match="does not fit the model"):
            Recommender.load(saved)
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"kind": "other"}))
    vouch(saved)
    with pytest.raises(ValueError, match="another version"):
        Recommender.load(saved)


@pytest.mark.parametrize(
    "wrong",
    [
        *(("n_lists", 3), ("n_searched", 0), ("n_searched", 10**6), ("n_searched", 1.5)),
        *(("recall", 1.5), ("recall", "high"), ("recall", float("nan")), ("depth", 0)),
    ],
)
def test_impossible_facts_of_an_index_are_refused(saved: Path, wrong: tuple[str, object]) -> None:
    facts = saved / index_files(saved)[0]
    facts.write_text(json.dumps(json.loads(facts.read_text()) | dict([wrong])))
    vouch(saved)
    with pytest.raises(ValueError, match=rf"{facts.name} is damaged"):
        Recommender.load(saved)


def test_files_that_vanish_while_they_are_read_are_no_crash(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`bert4rec index` in another process takes the old index away at just this moment."""

    def verify_and_lose(directory: Path) -> None:
        verify_manifest(directory)
        for name in index_files(directory):
            (directory / name).unlink()

    monkeypatch.setattr(model_directory, "verify_manifest", verify_and_lose)
    with pytest.raises(ValueError, match="was being replaced: load it again"):
        Recommender.load(saved)


def load_file_of(content: bytes, folder: Path) -> dict[str, torch.Tensor]:
    (folder / "copy").write_bytes(content)
    tensors = load_file(folder / "copy")
    (folder / "copy").unlink()
    return tensors


def vouch(directory: Path) -> None:
    names = [path.name for path in directory.iterdir() if path.name != "manifest.json"]
    write_manifest(directory, names)


def test_without_faiss_a_model_with_an_index_answers_exactly_and_says_so(
    saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    note_missing_faiss.cache_clear()
    monkeypatch.setitem(sys.modules, "faiss", None)
    with caplog.at_level(logging.WARNING):
        loaded, _ = Recommender.load(saved), Recommender.load(saved)
    assert len([record for record in caplog.records if "faiss" in record.message]) == 1
    assert loaded.recommend(["item-5"]).items == EXACT.recommend(["item-5"]).items
    with pytest.raises(ValueError, match=r"pip install 'bert4rec\[scale\]'"):
        loaded.build_index(histories_of(50))
    note = loaded.index_if_large(histories_of(50), at_least=1)
    assert note is not None
    assert "faiss is not installed" in note


def test_an_index_is_built_for_large_catalogues_of_models_that_can_have_one() -> None:
    recommender = Recommender(EXACT.model, EXACT.vocabulary, EXACT.config, EXACT.about)
    assert recommender.index_if_large(histories_of(50)) is None
    assert recommender.index is None
    note = recommender.index_if_large(histories_of(50), at_least=N_ITEMS)
    assert note is not None
    assert "recall@10" in note
    assert recommender.index is not None
    popular = EXACT.by_popularity()
    assert popular.index_if_large(histories_of(50), at_least=1) is None
    with pytest.raises(ValueError, match="popularity cannot have an index"):
        popular.build_index(histories_of(50))
    with pytest.raises(ValueError, match="there are 5"):
        recommender.build_index(histories_of(5))
    note = recommender.index_if_large(histories_of(5), at_least=N_ITEMS)
    assert note is not None  # a training is not lost for it
    assert "no index" in note
    assert "there are 5" in note
    with pytest.raises(ValueError, match="recall is 97"):
        recommender.build_index(histories_of(50), recall=97)


def test_a_model_with_an_index_can_be_served(saved: Path) -> None:
    from bert4rec.serving.http.api_routes import dump_json, recommended_fields

    served = load_model(saved, "model")
    assert served.recommender.index is not None
    answer = json.loads(dump_json(recommended_fields(served.recommender.recommend(["item-3"]))))
    assert len(answer["items"]) == 10
    assert all(each["probability"] is None for each in answer["items"])
    assert load_model(saved, "model", "exact").recommender.index is None


def test_the_verb_builds_measures_and_takes_away(tmp_path: Path) -> None:
    spans = histories_of(80)
    sequences = sequences_of([spans[i].tolist() for i in range(len(spans))], N_ITEMS)
    sequences.save(tmp_path / "data")
    about = {"data": {"fingerprint": sequences.fingerprint, "directory": None, "source": "x"}}
    plain = Recommender(EXACT.model, sequences.vocabulary, EXACT.config, about)
    plain.save(tmp_path / "model")
    assert len(leave_one_out(sequences).validation) > 40

    def bert4rec_index(*options: str) -> str:
        done = CliRunner().invoke(app, ["index", str(tmp_path / "model"), *options])
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    assert "an index pays from" in bert4rec_index()
    assert not index_files(tmp_path / "model")
    data = ["--data", str(tmp_path / "data")]
    assert "recall@10" in bert4rec_index("--kind", "ivf", *data)
    assert len(index_files(tmp_path / "model")) == 2
    assert "searched exactly" in bert4rec_index("--kind", "none")
    assert not index_files(tmp_path / "model")


def test_a_next_item_model_and_known_users_are_indexed_too() -> None:
    config = small_config(recipe="sasrec")
    model = build_model(config, N_ITEMS, n_users=0).eval()
    with torch.no_grad():
        model.item_embedding.weight[:N_ITEMS] = EXACT.model.item_embedding.weight[:N_ITEMS]  # type: ignore
    plain = Recommender(model, EXACT.vocabulary, config, EXACT.about)
    indexed = Recommender(model, EXACT.vocabulary, config, EXACT.about)
    assert indexed.build_index(histories_of(200)) is not None
    others = histories_of(100, seed=11)
    [found], [wanted] = indexed.top_k(others), plain.top_k(others)
    assert recall_of(found.items.tolist(), wanted.items.tolist()) > 0.94
