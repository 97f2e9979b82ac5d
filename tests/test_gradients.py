"""A batch in microbatches on several workers has the gradient of the whole, computed plainly."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from toys import random_histories, randomize, small_config

from bert4rec import losses
from bert4rec.config import Config
from bert4rec.data.splits import FOR_TRAINING, MicrobatchSize, Split, leave_one_out
from bert4rec.losses.negatives import Negatives
from bert4rec.models import MODELS, is_trained
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.models.kernels.row_embedding import RowEmbedding
from bert4rec.models.sequence_model import SequenceModel
from bert4rec.objectives import ModelSpec
from bert4rec.threads import WorkerThreads
from bert4rec.training.batches import Batch, Sizes, make_batch
from bert4rec.training.gradients import Gradients, clip_gradient, cost_of, fair_shares
from bert4rec.training.optimizer import Optimizer

TRAINED = [name for name in MODELS if is_trained(MODELS[name])]


def first_batch(split: Split, config: Config, size: MicrobatchSize = FOR_TRAINING) -> Batch:
    """All sequences of the first stage."""
    model = MODELS[config.model.name]
    values = config.model.model_dump()
    shape = ModelSpec(split.n_items, values["max_len"], model.has_mask, values.get("n_targets", 1))
    objective = config.stages[0].build(split.train, shape)
    sequences = objective.draw_sequences(np.random.default_rng(0))
    return make_batch(objective, sequences, split.n_items, torch.Generator().manual_seed(0), Sizes(size))


def some_batch(config: Config, n_users: int = 120, size: MicrobatchSize = FOR_TRAINING) -> tuple[Batch, int]:
    split = leave_one_out(random_histories(0, n_users=n_users))
    return first_batch(split, config, size), split.n_items


def gradients_on(n_workers: int, config: Config, batch: Batch, n_items: int, seed: int = 0) -> tuple[BERT4Rec, float]:
    torch.manual_seed(1)
    model = BERT4Rec(n_items, config.model).train()
    loss = config.loss.build(np.ones(n_items, dtype=np.int64))
    with WorkerThreads(n_workers) as workers:
        value = Gradients(model, loss, workers).add(batch, seed)
    return model, value


@pytest.mark.parametrize("n_workers", [1, 2, 3])
def test_the_gradient_is_that_of_the_whole_batch(n_workers: int) -> None:
    config = small_config("model.dropout=0", "stages.0.mask_ratio=0.4")
    batch, n_items = some_batch(config, size=MicrobatchSize(200, 20))
    assert len(batch.microbatches) > 3
    model, value = gradients_on(n_workers, config, batch, n_items)
    torch.manual_seed(1)
    plain = BERT4Rec(n_items, config.model).train()
    logits = torch.cat([plain(each.tokens).flatten(0, 1)[each.positions] for each in batch.microbatches])
    targets = [each.targets for each in batch.microbatches]
    expected = F.cross_entropy(logits, torch.cat(targets))
    expected.backward()
    assert value == pytest.approx(float(expected.detach()), rel=1e-5)
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-6)


def test_the_same_seed_gives_the_same_bits_and_another_one_other_dropout() -> None:
    config = small_config("model.dropout=0.3", "model.attention_dropout=0.2")
    batch, n_items = some_batch(config)
    first, again, other = (gradients_on(2, config, batch, n_items, s) for s in (7, 7, 8))
    assert first[1] == again[1]
    assert first[1] != other[1]
    for a, b in zip(first[0].parameters(), again[0].parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


def test_sampled_losses_leave_a_sparse_gradient_and_move_only_touched_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "SPARSE_FROM", 0)
    config = small_config("loss.name=sampled-softmax", "loss.n_negatives=4", "model.dropout=0")
    batch, n_items = some_batch(config, n_users=3)
    model, _ = gradients_on(2, config, batch, n_items)
    gradient = model.item_embedding.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    before = model.item_embedding.weight.detach().clone()
    touched = set(gradient.coalesce().indices()[0].tolist())
    Optimizer(model, config.training.weight_decay).step(0.01)
    moved = (model.item_embedding.weight.detach() != before).any(1).nonzero()[:, 0].tolist()
    assert set(moved) | {model.pad_token} == touched | {model.pad_token}  # padding has no say
    assert touched <= set(range(n_items + 2))


def test_every_microbatch_is_distributed_once_and_fairly() -> None:
    batch, n_items = some_batch(small_config(), n_users=2000)
    shares = fair_shares(batch.microbatches, lambda each: cost_of(each, n_items), 2)
    found = sorted(id(each) for share in shares for each in share)
    assert found == sorted(map(id, batch.microbatches))
    work = [sum(each.tokens.numel() for each in share) for share in shares]
    assert max(work) < 1.5 * min(work)


def test_clipping_counts_dense_and_sparse_gradients() -> None:
    dense, rows = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(5, 1))
    dense.grad = torch.tensor([3.0, 0.0])
    # The same row twice: its gradient is 4.
    rows.grad = torch.sparse_coo_tensor([[2, 2]], [[1.0], [3.0]], (5, 1), check_invariants=True)
    assert float(clip_gradient([dense, rows], 1.0)) == pytest.approx(5.0)
    assert dense.grad.tolist() == pytest.approx([0.6, 0.0])
    assert rows.grad.to_dense()[2].item() == pytest.approx(0.8)


def test_an_error_in_a_worker_reaches_the_caller() -> None:
    with WorkerThreads(2) as workers, pytest.raises(ZeroDivisionError):
        workers.map(lambda n: 1 // n, [1, 0])


def test_workers_take_their_share_of_the_cores_and_leave_others_alone() -> None:
    before = torch.get_num_threads()
    with WorkerThreads(before) as workers:
        assert set(workers.map(lambda _: torch.get_num_threads(), range(4))) == {1}
    assert torch.get_num_threads() == before
    with WorkerThreads(1) as one:
        assert one.map(lambda _: torch.get_num_threads(), [0]) == [before]


N_USERS = 20  # fewer than items
N_FIXED = 3  # negatives that every query has, so that no division of the work changes a loss


def large_weights(config: Config, n_items: int) -> SequenceModel:
    torch.manual_seed(1)
    cls = MODELS[config.model.name]
    assert is_trained(cls)
    return randomize(cls(n_items, config.model, N_USERS), 0.3).train()


def plain_loss(model: SequenceModel, batch: Batch, loss: str) -> torch.Tensor:
    total = torch.zeros(())
    for each in batch.microbatches:
        encode = model.encode_prefixes if each.inserts_masks else model.encode_queries
        h = encode(each.tokens, each.positions, each.users)
        scores = model.output_layer().block_scores(h, 0, model.n_items)
        if loss == "cross-entropy":
            total = total + F.cross_entropy(scores, each.targets, reduction="sum")
            continue
        wanted = scores.gather(1, each.targets[:, None])[:, 0]
        counts = torch.arange(N_FIXED) != each.targets[:, None]
        unwanted = (F.logsigmoid(-scores[:, :N_FIXED]) * counts).sum()
        total = total - F.logsigmoid(wanted).sum() - unwanted
    return total / batch.n_queries


def dense(gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if gradient is None else gradient.to_dense()


def assert_same_gradients(model: SequenceModel, plain: SequenceModel, n_times: int) -> None:
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        wanted = dense(theirs[name].grad, parameter)
        difference = (dense(parameter.grad, parameter) / n_times - wanted).abs().max()
        assert difference <= 1e-5 * max(1.0, float(wanted.abs().max())), name


@pytest.mark.parametrize(
    ("loss", "sparse_from"), [("cross-entropy", 0), ("bce", losses.SPARSE_FROM), ("bce", N_USERS + 1), ("bce", 0)]
)
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_in_place_or_sparse_on_one_or_two_workers_are_those_of_plain_autograd(
    name: str, loss: str, sparse_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fixed(self: Negatives, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
        return torch.arange(N_FIXED).expand(shape)

    monkeypatch.setattr(Negatives, "draw", fixed)
    monkeypatch.setattr(losses, "SPARSE_FROM", sparse_from)
    overrides = [f"model.name={name}", f"loss.name={loss}", "model.dropout=0"]
    if loss == "bce":
        overrides.append(f"loss.n_negatives={N_FIXED}")
    config = small_config(*overrides)
    split = leave_one_out(random_histories(0, n_users=N_USERS))
    batch = first_batch(split, config, MicrobatchSize(80, 20))
    assert len(batch.microbatches) > 3
    plain = large_weights(config, split.n_items)
    expected = plain_loss(plain, batch, loss)
    expected.backward()
    for n_workers in (1, 2):
        model = large_weights(config, split.n_items)
        tables = [module for module in model.modules() if isinstance(module, RowEmbedding)]
        with WorkerThreads(n_workers) as workers:
            minimised = config.loss.build(split.train_counts)
            gradients = Gradients(model, minimised, workers)
            for table in tables:
                assert table.sparse == (loss == "bce" and table.num_embeddings >= sparse_from)
            in_place = {table: table.weight.grad for table in tables if not table.sparse}
            # Twice: what a worker has handed over must not be counted again.
            values = [gradients.add(batch, 0) for _ in range(2)]
        assert values == pytest.approx([float(expected.detach())] * 2, rel=1e-5)
        assert_same_gradients(model, plain, n_times=2)
        for table in tables:
            gradient = table.weight.grad
            assert gradient is not None
            assert gradient.is_sparse == table.sparse
            if not table.sparse:  # the same memory as before
                assert gradient is in_place[table]
