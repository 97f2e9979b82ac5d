"""Laws of the model: what must not change a score, and what must be learnable."""

from pathlib import Path

import pytest
import torch
from toys import cycle, random_histories, small_config, untrained_recommender

from bert4rec.config import ModelConfig
from bert4rec.data.splits import leave_one_out
from bert4rec.evaluation.evaluate import full_ranks
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.pipeline import train_recommender

N_ITEMS = 30
USERS = torch.zeros(1, dtype=torch.int64)


@pytest.fixture(scope="module")
def model() -> BERT4Rec:
    bert = untrained_recommender(N_ITEMS).model
    assert isinstance(bert, BERT4Rec)
    return bert


def padded(history: list[int], left: int, right: int) -> torch.Tensor:
    return torch.tensor([[N_ITEMS] * left + history + [N_ITEMS] * right])


@pytest.mark.parametrize("history", [[3], [1, 2, 3], list(range(25))])
def test_padding_on_either_side_changes_no_score(model: BERT4Rec, history: list[int]) -> None:
    bare = model.score(USERS, padded(history, 0, 0))
    for left, right in ((0, 7), (7, 0), (3, 4)):
        score = model.score(USERS, padded(history, left, right))
        torch.testing.assert_close(score, bare, atol=1e-5, rtol=1e-5)


def test_alone_equals_in_a_batch(model: BERT4Rec) -> None:
    histories = [[1], [4, 5, 6], list(range(20)), [7, 7, 7, 7], []]
    longest = max(map(len, histories))
    rows = [history + [N_ITEMS] * (longest - len(history)) for history in histories]
    together = model.score(torch.zeros(len(rows)), torch.tensor(rows))
    for row, history in enumerate(histories):
        alone = model.score(USERS, padded(history, 0, 0).long())
        torch.testing.assert_close(together[row], alone[0], atol=1e-5, rtol=1e-5)


def test_only_the_last_items_that_fit_are_read_and_all_of_them_count(model: BERT4Rec) -> None:
    n_read = model.max_len - 1
    history = list(range(n_read + 5))
    whole = model.score(USERS, padded(history, 0, 0))
    torch.testing.assert_close(whole, model.score(USERS, padded(history[-n_read:], 0, 0)))
    changed = history.copy()
    changed[-n_read] = 29  # the oldest item that fits
    assert not torch.allclose(whole, model.score(USERS, padded(changed, 0, 0)), atol=1e-3)
    changed = history.copy()
    changed[-n_read - 1] = 29  # the one before it
    torch.testing.assert_close(whole, model.score(USERS, padded(changed, 0, 0)))


def test_order_and_length_matter(model: BERT4Rec) -> None:
    forward = model.score(USERS, padded([1, 2, 3], 0, 0))
    assert not torch.allclose(forward, model.score(USERS, padded([3, 2, 1], 0, 0)), atol=1e-3)


def test_the_output_is_tied_to_the_item_embedding(model: BERT4Rec) -> None:
    weight, bias = model.output()
    assert weight.data_ptr() == model.items.weight.data_ptr()
    assert weight.shape == (N_ITEMS + 2, 16)
    assert bias.shape == (N_ITEMS,)


def test_forward_pass_equals_the_papers_equations() -> None:
    """Eq. 1–7 written down again, with explicit loops over heads."""
    torch.manual_seed(1)
    config = ModelConfig(dim=8, heads=2, layers=2, max_len=6, dropout=0.3)
    model = BERT4Rec(5, config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    tokens = torch.tensor([2, 0, 6, 4])  # 6 is [MASK]
    h = model.items.weight[tokens] + model.positions.weight[:4]
    h = torch.nn.functional.layer_norm(h, (8,), model.norm.weight, model.norm.bias)
    for block in model.blocks:
        qkv = h @ block.attention.query_key_value.weight.T + block.attention.query_key_value.bias
        heads = []
        for head in range(2):
            q, k, v = (qkv[:, 8 * part + 4 * head : 8 * part + 4 * head + 4] for part in range(3))
            heads.append(torch.softmax(q @ k.T / 4**0.5, -1) @ v)
        mixed = torch.cat(heads, -1) @ block.attention.output.weight.T
        mixed = mixed + block.attention.output.bias
        a = block.norm_1(h + mixed)
        inner = a @ block.feed_forward.inner.weight.T + block.feed_forward.inner.bias
        gelu = inner * 0.5 * (1 + torch.erf(inner / 2**0.5))
        h = block.norm_2(
            a + gelu @ block.feed_forward.output.weight.T + block.feed_forward.output.bias
        )
    asked = h[2] @ model.head.weight.T + model.head.bias
    asked = model.head_norm(asked * 0.5 * (1 + torch.erf(asked / 2**0.5)))
    expected = asked @ model.items.weight[:5].T + model.output_bias
    hidden = model.asked(tokens[None], torch.tensor([2]), USERS)
    weight, bias = model.output()
    torch.testing.assert_close(hidden[0] @ weight[:5].T + bias, expected)


def test_the_heads_layer_norm_can_be_left_out() -> None:
    """GELU(hW + b) as the paper's Eq. 7 has it, without the LayerNorm of the authors' code."""
    model = BERT4Rec(5, ModelConfig(dim=8, head_norm=False)).eval()
    tokens, at = torch.tensor([[1, 6]]), torch.tensor([1])
    hidden = model.hidden(tokens)[0, 1]
    expected = torch.nn.functional.gelu(hidden @ model.head.weight.T + model.head.bias)
    torch.testing.assert_close(model.asked(tokens, at, USERS)[0], expected)
    assert "head_norm.weight" not in model.state()


def test_attention_rows_are_distributions_and_dropout_is_off_when_scoring(model: BERT4Rec) -> None:
    attention = model.attention(torch.tensor([1, 2, 3]))
    assert attention.shape == (2, 2, 4, 4)
    torch.testing.assert_close(attention.sum(-1), torch.ones(2, 2, 4))
    model.train()
    first, second = (model.score(USERS, padded([1, 2], 0, 0)) for _ in range(2))
    assert torch.equal(first, second)


def test_dropout_drops_the_stated_share_and_keeps_the_mean() -> None:
    from bert4rec.models.layers import ByteDropout

    torch.manual_seed(0)
    dropout = ByteDropout(0.3).train()
    out = dropout(torch.ones(1000, 999))
    assert abs(float((out == 0).float().mean()) - 77 / 256) < 0.002
    assert abs(float(out.mean()) - 1) < 0.003
    assert torch.equal(dropout.eval()(out), out)


def test_a_reused_mask_is_the_same_for_all_pieces_until_the_next_draw() -> None:
    from bert4rec.models.layers import ByteDropout

    dropout, x = ByteDropout(0.5).train(), torch.ones(40, 16)
    dropout.reuse_masks(torch.Generator().manual_seed(3))
    first = dropout(x)
    assert torch.equal(dropout(x), first)
    assert torch.equal(dropout(x[:7]), first[:7])
    assert torch.equal(dropout.added(x, x), x + first)
    dropout.reuse_masks(torch.Generator().manual_seed(4))
    assert not torch.equal(dropout(x), first)
    dropout.reuse_masks(None)
    assert not torch.equal(dropout(x), dropout(x))


def test_a_toy_cycle_is_learned_perfectly(tmp_path: Path) -> None:
    sequences = cycle()
    config = small_config(
        "epochs=100",
        "validate_every=100",  # at the end: the first perfect validation may come by luck
        "learning_rate=2e-3",
        "dropout=0",
        "second_stage.epochs=15",
        "evaluation.exclude_seen=false",  # the next item of a cycle has been seen before
    )
    outcome = train_recommender(sequences, config, tmp_path / "model")
    assert outcome.evaluation.value("HR@1") == 1.0
    assert outcome.baselines["popularity"].value("HR@1") < 0.5


def test_evaluations_rank_is_the_place_in_recommend() -> None:
    recommender = untrained_recommender()
    questions = leave_one_out(random_histories(3)).test
    ranks = full_ranks(recommender.model, questions, exclude_seen=True).tolist()
    n_checked = 0
    for row, rank in enumerate(ranks):
        history = [recommender.vocabulary.raw(t) for t in questions.histories[row].tolist()]
        found = recommender.recommend(history, k=N_ITEMS)
        target = recommender.vocabulary.raw(int(questions.targets[row]))
        if target in history:
            assert rank == 0
            continue
        assert [each.item for each in found].index(target) + 1 == rank
        n_checked += 1
    assert n_checked > 10
