"""Smaller copies of models: close to the original, complete, measured; and never trained."""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from toys import quiet, random_histories, sequences_of, small_config
from typer.testing import CliRunner

from bert4rec import model_directory
from bert4rec.cli import app
from bert4rec.compression import compress, quantize
from bert4rec.data.database import read_parquet
from bert4rec.data.sequences import Sequences
from bert4rec.distributed.batch_scoring import recommend_users
from bert4rec.distributed.user_rows import BatchRequest
from bert4rec.evaluation.compare import compare
from bert4rec.models import MODELS, is_trained
from bert4rec.models.kernels.row_embedding import RowEmbedding
from bert4rec.models.output import DotProduct, QuantizedDotProduct, dot_product_output
from bert4rec.models.quantized_embedding import (
    BLOCK,
    MANY_VECTORS,
    N_CENTROIDS,
    Int8Embedding,
    ProductQuantizedEmbedding,
    QuantizedEmbedding,
    int8_embedding,
)
from bert4rec.models.sasrec import SASRec
from bert4rec.models.sequence_model import SequenceModel
from bert4rec.pipeline import RunOptions, split_of, train_recommender
from bert4rec.recommender import Recommender
from bert4rec.scoring import score_blocks, score_rows
from bert4rec.serving.model_registry import load_model
from bert4rec.training.setup import build_model

N_ITEMS, DIM = 300, 16
HISTORIES = [[1], [4, 5, 6], list(range(20)), [7, 7, 8, 7], [299, 3]]
IN_PRODUCTS = [name for name in MODELS if is_trained(MODELS[name]) and name != "neumf"]


def random_recommender(name: str) -> Recommender:
    """A model with random weights, large enough to give clearly different scores."""
    config = small_config(recipe=name)
    model = build_model(config, N_ITEMS, n_users=5).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    vocabulary = sequences_of([list(range(N_ITEMS))], N_ITEMS).vocabulary
    return Recommender(model, vocabulary, config, {"data": {"fingerprint": "none"}})


def scores(recommender: Recommender) -> torch.Tensor:
    """Of histories that are cut as the model reads them."""
    n = recommender.model.max_history
    read = [history if n is None else history[-n:] for history in HISTORIES]
    longest = max(map(len, read))
    rows = [history + [N_ITEMS] * (longest - len(history)) for history in read]
    return score_rows(recommender.model, torch.arange(len(rows)), torch.tensor(rows))


@cache
def trained() -> tuple[Path, Sequences]:
    sequences = random_histories(0, n_users=60, n_items=N_ITEMS)
    out = Path(mkdtemp()) / "model"
    settings = small_config("stages.0.epochs=1", "stages.1.epochs=1")
    train_recommender(sequences, settings, out, RunOptions(baselines=False), console=quiet())
    return out, sequences


@cache
def compressed() -> Path:
    model, sequences = trained()
    compress(model, model.with_name("small"), sequences)
    return model.with_name("small")


def random_embedding(code: str, n_items: int, n_special: int) -> QuantizedEmbedding:
    generator = torch.Generator().manual_seed(0)
    if code == "int8":
        return int8_embedding(torch.randn(n_items + n_special, DIM, generator=generator), n_items)
    codes = torch.randint(0, N_CENTROIDS, (n_items, 4), generator=generator).to(torch.uint8)
    centroids = torch.randn(4, N_CENTROIDS, DIM // 4, generator=generator)
    return ProductQuantizedEmbedding(codes, centroids, torch.randn(n_special, DIM, generator=generator))


@pytest.mark.parametrize("code", ["int8", "pq"])
@pytest.mark.parametrize("n_items", [300, 2 * BLOCK, 2 * BLOCK + 7])
@pytest.mark.parametrize("n_vectors", [1, 40, MANY_VECTORS])
def test_a_quantized_output_scores_as_the_plain_one_of_its_decoded_vectors(
    code: str, n_items: int, n_vectors: int
) -> None:
    embedding = random_embedding(code, n_items, 2)
    bias, h = torch.randn(n_items), torch.randn(n_vectors, DIM)
    plain = DotProduct(embedding.block(0, n_items), bias)
    quantized = dot_product_output(embedding, bias)
    assert isinstance(quantized, QuantizedDotProduct)
    assert quantized.n_items == n_items
    everything = quantized.block_scores(h, 0, n_items)
    torch.testing.assert_close(everything, plain.block_scores(h, 0, n_items), atol=1e-4, rtol=1e-4)
    weight, some_bias = quantized.block(100, 250)
    torch.testing.assert_close(h @ weight.T + some_bias, everything[:, 100:250], atol=1e-4, rtol=1e-4)
    for output in (quantized, plain):
        some = output.block_scores(h, 100, n_items)
        torch.testing.assert_close(some, everything[:, 100:], atol=1e-4, rtol=1e-4)
    for items in (torch.tensor([[3, 299, 3]]), torch.randint(0, n_items, (n_vectors, 5))):
        torch.testing.assert_close(quantized.scores(h, items), plain.scores(h, items))
    tokens = torch.tensor([[0, n_items - 1], [n_items, n_items + 1]])
    torch.testing.assert_close(embedding(tokens)[0], plain.weight[[0, -1]])
    assert torch.equal(embedding(tokens)[1], embedding.special)


@pytest.mark.parametrize("code", ["int8", "pq"])
def test_a_search_of_compressed_vectors_never_decodes_more_than_a_small_block(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dequantized blocks of the search's size fall out of the cache: five times as slow."""
    embedding = random_embedding(code, 3 * BLOCK, 2)

    def too_much(first: int, last: int) -> torch.Tensor:
        raise AssertionError(f"{last - first} vectors were decoded at once")

    monkeypatch.setattr(embedding, "block", too_much)
    output = QuantizedDotProduct(embedding, torch.zeros(3 * BLOCK))
    for n_vectors in (1, MANY_VECTORS):
        h = torch.randn(n_vectors, DIM)
        found = torch.cat([scores for _, scores in score_blocks(output, h)], 1)
        torch.testing.assert_close(found, output.block_scores(h, 0, 3 * BLOCK))


@pytest.mark.parametrize("code", ["int8", "pq"])
def test_codes_of_other_items_are_refused(code: str) -> None:
    recommender = random_recommender("sasrec")
    model = quantize(recommender, code).model  # type: ignore[arg-type]
    assert isinstance(model, SequenceModel)
    tensors, config = model.state(), recommender.config.model
    SASRec.restore(tensors, config, N_ITEMS)
    wrong = {"codes": tensors["item_embedding.codes"][:-1], "special": tensors["item_embedding.special"][:0]}
    if code == "int8":
        wrong["scales"] = tensors["item_embedding.scales"][:-1]
    else:
        wrong["centroids"] = tensors["item_embedding.centroids"][:-1]
    for name, tensor in wrong.items():
        with pytest.raises(ValueError, match=r"quantized item_embedding does not fit the model"):
            SASRec.restore(tensors | {f"item_embedding.{name}": tensor}, config, N_ITEMS)


def test_the_facts_of_a_served_model_decode_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    served = load_model(compressed(), "small")
    monkeypatch.setattr(Int8Embedding, "block", None)
    assert served.has_vectors


def test_blocks_of_a_plain_output_are_its_rows() -> None:
    embedding, bias = RowEmbedding(9, DIM), torch.randn(7)
    output = dot_product_output(embedding, bias)
    assert isinstance(output, DotProduct)
    assert output.weight is embedding.weight  # the parameter itself: a loss adds to its gradient
    weight, some_bias = output.block(2, 5)
    assert torch.equal(weight, embedding.weight[2:5])
    assert torch.equal(some_bias, bias[2:5])


def test_int8_is_off_by_half_a_step_at_most_and_keeps_zeros_and_special_rows() -> None:
    weight = torch.randn(50, DIM) * torch.logspace(-6, 6, 50)[:, None]
    weight[7] = 0
    embedding = int8_embedding(weight, 48)
    error = (embedding.block(0, 48) - weight[:48]).abs().amax(1)
    assert bool((error <= weight[:48].abs().amax(1) / 127 * 0.5001).all())
    assert torch.equal(embedding.block(7, 8), torch.zeros(1, DIM))
    assert torch.equal(embedding.special, weight[48:])


def test_product_quantization_finds_vectors_that_are_made_of_few_parts() -> None:
    """With 256 different parts at most, next to nothing is lost."""
    recommender = random_recommender("sasrec")
    model = recommender.model
    assert isinstance(model, SequenceModel)
    with torch.no_grad():
        parts = torch.randn(40, DIM)
        model.item_embeddings()["item_embedding"].weight[:N_ITEMS] = parts[torch.arange(N_ITEMS) % 40]
    quantized = quantize(recommender, "pq", 4)
    # faiss moves superfluous centroids by a thousandth
    torch.testing.assert_close(scores(quantized), scores(recommender), atol=0.02, rtol=0.01)


@pytest.mark.parametrize("name", IN_PRODUCTS)
@pytest.mark.parametrize("code", ["int8", "pq"])
def test_every_model_with_item_embeddings_is_saved_smaller_and_recommends(name: str, code: str, tmp_path: Path) -> None:
    recommender = random_recommender(name)
    before = scores(recommender)
    quantized = quantize(recommender, code, 2)  # type: ignore[arg-type]
    after = scores(quantized)
    assert torch.equal(scores(recommender), before)  # the original is left alone
    likeness = np.corrcoef(before.flatten().numpy(), after.flatten().numpy())[0, 1]
    assert likeness > 0.99
    assert not torch.equal(before, after)
    quantized.save(tmp_path / "quantized")
    loaded = Recommender.load(tmp_path / "quantized")
    torch.testing.assert_close(scores(loaded), after)
    assert isinstance(loaded.model, SequenceModel)
    assert not loaded.model.item_embeddings()  # in memory, too, there are only codes
    embeddings = [part for part in loaded.model.modules() if isinstance(part, QuantizedEmbedding)]
    assert all(isinstance(e, Int8Embedding if code == "int8" else ProductQuantizedEmbedding) for e in embeddings)
    assert not any(tensor.is_meta for tensor in loaded.model.state().values())
    if code == "int8":
        assert quantized.about["compression"]["n_bytes"] < quantized.about["compression"]["n_bytes_before"]


def test_a_compressed_model_answers_every_kind_of_request(tmp_path: Path) -> None:
    model, sequences = trained()
    small, large = Recommender.load(compressed()), Recommender.load(model)
    history = ["item-1", "item-2", "item-3"]
    found = small.recommend(history, 5, allow=[f"item-{i}" for i in range(2, 9)], block=["item-8"])
    assert {each.item for each in found} == {f"item-{i}" for i in range(4, 8)}
    many = list(small.recommend_many([history, ["item-9"]], 3))
    assert [each.item for each in many[0]] == [each.item for each in small.recommend(history, 3)]
    alike, exactly = small.similar("item-1", 299), large.similar("item-1", 299)
    cosines = {each.item: each.score for each in exactly}
    assert all(abs(each.score - cosines[each.item]) < 0.02 for each in alike)
    explained = small.explain(history, "item-5")
    assert [each.item for each in explained.influences] == history
    assert explained.attention is not None
    n_rows = recommend_users(small, sequences, tmp_path / "all.parquet", BatchRequest(k=3))
    assert n_rows == 3 * sequences.n_users


def test_the_loss_of_quality_is_paired_on_the_validation_items_and_kept(tmp_path: Path) -> None:
    model, sequences = trained()
    made = compress(model, tmp_path / "small", sequences, code="pq", numbers_per_byte=4)
    kept = json.loads((tmp_path / "small" / "about.json").read_text())["compression"]
    assert kept["item_vectors"] == "pq"
    assert kept["numbers_per_byte"] == 4
    rows = {each["metric"]: each for each in kept["validation"]["differences"]}
    assert set(rows) == {"HR@10", "NDCG@10", "MRR"}
    for each in made.validation.differences:
        assert rows[each.metric]["difference"] == pytest.approx(each.b - each.a)
        assert each.low <= each.difference <= each.high
    n_held_out = int((np.diff(sequences.offsets) >= 3).sum())
    assert kept["validation"]["n_users"] == n_held_out
    # Its metrics are its own, of the same test users: the two runs can be compared.
    assert compare(model, tmp_path / "small").n_users == n_held_out
    assert made.n_bytes == (tmp_path / "small" / "model.safetensors").stat().st_size
    fewer = compress(model, tmp_path / "small", sequences, n_users=10, overwrite=True)
    assert fewer.validation.n_users == 10
    assert len(read_parquet(tmp_path / "small" / "per_user.parquet")["user"]) == 10


def test_a_compressed_model_is_neither_trained_nor_compressed_again(tmp_path: Path) -> None:
    _, sequences = trained()
    small = Recommender.load(compressed()).model
    assert isinstance(small, SequenceModel)
    with pytest.raises(ValueError, match=r"quantized and cannot be trained"):
        small.train()
    with pytest.raises(ValueError, match=r"compressed already"):
        compress(compressed(), tmp_path / "smaller", sequences)
    settings = small_config("stages.0.epochs=1")
    with pytest.raises(ValueError, match=r"holds a finished model"):
        train_recommender(sequences, settings, compressed(), RunOptions(resume=True))


def test_wrong_settings_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    model, sequences = trained()
    other = tmp_path / "notes"
    other.mkdir()
    (other / "mine.txt").write_text("keep me")
    with pytest.raises(ValueError, match=r"the model itself"):
        compress(model, model, sequences, overwrite=True)
    with pytest.raises(ValueError, match=r"something else than a model"):
        compress(model, other, sequences, overwrite=True)
    with pytest.raises(ValueError, match=r"numbers per byte is 3.*16 wide: choose one of 1, 2, 4"):
        compress(model, tmp_path / "new", sequences, code="pq", numbers_per_byte=3)
    with pytest.raises(ValueError, match=r"'int4': choose one of int8, pq"):
        compress(model, tmp_path / "new", sequences, code="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"not the data that the model was trained on"):
        compress(model, tmp_path / "new", random_histories(1, n_items=N_ITEMS))
    with pytest.raises(ValueError, match=r"n_users is 0"):
        compress(model, tmp_path / "new", sequences, n_users=0)
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match=r"pass --overwrite"):
        compress(model, compressed(), sequences)


def test_models_without_item_embeddings_are_refused_by_name() -> None:
    neumf = random_recommender("neumf")
    for recommender in (neumf, neumf.by_popularity()):
        name = recommender.config.model.name
        with pytest.raises(ValueError, match=rf"{name} cannot be compressed"):
            quantize(recommender)


def test_product_quantization_of_few_items_says_what_to_do() -> None:
    sequences = random_histories(0)
    config = small_config()
    model = build_model(config, 30, n_users=0)
    few = Recommender(model, sequences.vocabulary, config, {})
    with pytest.raises(ValueError, match=r"needs 256 items or more.*has 30: use int8"):
        quantize(few, "pq")


def test_the_verb_prints_the_difference_and_needs_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sequences = trained()
    indexed = Recommender.load(model)
    assert indexed.build_index(split_of(indexed, sequences).validation.histories, recall=0.01)
    model = shutil.copytree(model, tmp_path / "model")
    indexed.save_index(model)
    monkeypatch.setattr(model_directory, "read_index", None)
    sequences.save(tmp_path / "data")
    words = ["compress", str(model), "--out", str(tmp_path / "small"), "--data"]
    done = CliRunner().invoke(app, [*words, str(tmp_path / "data")])
    assert done.exit_code == 0, done.output
    assert "NDCG@10" in done.output
    assert "Item embeddings: 0.02 MB before, 0.01 MB now" in done.output
