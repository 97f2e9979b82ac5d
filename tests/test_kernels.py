"""Every fast kernel computes what `BERT4Rec.forward` says, at the query positions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toys import randomize

from bert4rec.models.bert4rec import BERT4Rec, BERT4RecSettings, CausalBERT4Rec
from bert4rec.models.kernels import additive_attention as additive
from bert4rec.models.kernels import blocks
from bert4rec.models.kernels.additive_attention import additive_attention
from bert4rec.models.kernels.blocks import attend_to_prefixes
from bert4rec.scoring import score_rows

N_ITEMS, PAD, MASK = 30, 30, 31
UNKNOWN = torch.full((3,), -1)
ABLATIONS = [(), ("positions",), ("feed_forward",), ("layer_norm",), ("residual",)]
MODELS = [BERT4Rec, CausalBERT4Rec]

ablations = pytest.mark.parametrize("ablation", ABLATIONS, ids=lambda each: each[0] if each else "")
models = pytest.mark.parametrize("cls", MODELS)


def random_model(cls: type[BERT4Rec] = BERT4Rec, ablation: tuple[str, ...] = (), layers: int = 2) -> BERT4Rec:
    torch.manual_seed(0)
    values = BERT4RecSettings(
        dim=16, max_len=12, dropout=0, layers=layers, initialization="paper", output_gain=1, ablation=ablation
    )
    return randomize(cls(N_ITEMS, values), 0.3)  # without norms larger ones grow, and so do errors


def scores_at(model: BERT4Rec, vectors: Tensor) -> Tensor:
    return model.output_layer().block_scores(vectors, 0, N_ITEMS)


def random_tokens(n_rows: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, N_ITEMS, (n_rows, length), generator=generator)


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


# Query positions only.

POSITIONS = {
    "one per row": [5, 11, 15],
    "as many in each row": [0, 5, 8, 11, 12, 15],
    "not as many": [0, 1, 5, 12, 15],
    "one row without": [0, 1, 5],
}


@ablations
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("is_padded", [True, False])
def test_queries_are_those_of_forward(ablation: tuple[str, ...], positions: list[int], is_padded: bool) -> None:
    model, tokens, at = (random_model(BERT4Rec, ablation), random_tokens(3, 6), torch.tensor(positions))
    tokens.view(-1)[at] = MASK
    if is_padded:
        tokens[2, 4:] = PAD
    expected = model(tokens).flatten(0, 1)[at]
    assert_same(scores_at(model, model.encode_queries(tokens, at, UNKNOWN)), expected)
    with torch.inference_mode():
        assert_same(scores_at(model, model.encode_queries(tokens, at, UNKNOWN)), expected)


@models
@ablations
@pytest.mark.parametrize("lengths", [[6, 6, 6], [6, 4, 1], [5], [0, 2], [0]])
def test_a_history_is_scored_as_by_forward(cls: type[BERT4Rec], ablation: tuple[str, ...], lengths: list[int]) -> None:
    """A single request has a kernel of its own."""
    model = random_model(cls, ablation)
    histories = random_tokens(len(lengths), max(lengths))
    for row, length in enumerate(lengths):
        histories[row, length:] = PAD
    found = score_rows(model, UNKNOWN[: len(lengths)], histories)
    for row, length in enumerate(lengths):
        tokens = torch.cat([histories[row, :length], torch.tensor([MASK])])
        assert_same(found[row], model(tokens[None])[0, -1])


def test_a_single_request_takes_the_fused_block(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    fused = blocks._run_single
    monkeypatch.setattr(blocks, "_run_single", lambda *x: (calls.append(1), fused(*x))[1])
    score_rows(random_model(), UNKNOWN[:1], random_tokens(1, 5))
    assert len(calls) == 1  # of the two blocks the last is computed at one position only


@ablations
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
def test_gradients_of_queries_are_those_of_forward(ablation: tuple[str, ...], positions: list[int]) -> None:
    model, tokens, at = (random_model(BERT4Rec, ablation), random_tokens(3, 6), torch.tensor(positions))
    tokens[1, 5:] = PAD
    weights = torch.randn(len(at), N_ITEMS, generator=torch.Generator().manual_seed(1))
    (scores_at(model, model.encode_queries(tokens, at, UNKNOWN)) * weights).sum().backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    (model(tokens).flatten(0, 1)[at] * weights).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-3, rtol=1e-3)


# Prefixes: a [MASK] after each of many positions, in one pass.


def plain_prefixes(model: BERT4Rec, tokens: Tensor, positions: Tensor) -> Tensor:
    """The plain blocks over items and queries together, with what each may see written down.

    Items up to a row's first query see each other, later ones those before them; the [MASK] after
    position i sees the items 0..i and itself.
    """
    length, out = tokens.shape[1], []
    for row, items in enumerate(tokens):
        queries = [int(p) % length for p in positions if int(p) // length == row]
        first = min(queries, default=0)
        n, n_all = length, length + len(queries)
        visible = torch.zeros(n_all, n_all, dtype=torch.bool)
        for i in range(n):
            visible[i, : (i if model.is_causal else max(i, first)) + 1] = True
        for j, query in enumerate(queries):
            visible[n + j, : query + 1] = True
            visible[n + j, n + j] = True
        x = model.item_embedding(torch.cat([items, torch.full((len(queries),), MASK)]))
        if model.position_embedding is not None:
            places = [*range(length), *(query + 1 for query in queries)]
            x = x + model.position_embedding.weight[places]
        x = model.norm(x)[None]
        for block in model.blocks:
            x = block(x, visible[None, None])
        out.append(x[0, n:])
    return scores_at(model, model.output_transform(torch.cat(out)))


@models
@ablations
@pytest.mark.parametrize("firsts", [[0, 0, 0], [3, 0, 5], [8, 8, 8]])
def test_prefixes_from_a_random_first_query_are_those_of_the_plain_blocks(
    cls: type[BERT4Rec], ablation: tuple[str, ...], firsts: list[int]
) -> None:
    model, tokens = random_model(cls, ablation), random_tokens(3, 9)
    positions = torch.cat([torch.arange(9 * row + f, 9 * row + 9) for row, f in enumerate(firsts)])
    found = scores_at(model, model.encode_prefixes(tokens, positions, UNKNOWN))
    assert_same(found, plain_prefixes(model, tokens, positions))


@models
@ablations
def test_prefixes_are_those_of_forward(cls: type[BERT4Rec], ablation: tuple[str, ...]) -> None:
    """The i-th is `forward` at the [MASK] after the items 0..i.

    For the bidirectional model with one block only: before a second one items see [MASK], too.
    """
    layers = 2 if cls is CausalBERT4Rec else 1
    model, tokens = random_model(cls, ablation, layers), random_tokens(3, 9)
    at_once = scores_at(model, model.encode_prefixes(tokens, torch.arange(27), UNKNOWN))
    for n in range(1, 10):
        queried = torch.cat([tokens[:, :n], torch.full((3, 1), MASK)], 1)
        assert_same(at_once.view(3, 9, -1)[:, n - 1], model(queried)[:, -1])


def test_training_queries_are_those_of_recommending_in_the_causal_model() -> None:
    model, histories = random_model(CausalBERT4Rec), random_tokens(3, 9)
    at_once = scores_at(model, model.encode_prefixes(histories, torch.arange(27), UNKNOWN))
    for n in range(1, 10):
        assert_same(at_once.view(3, 9, -1)[:, n - 1], score_rows(model, UNKNOWN, histories[:, :n]))


@ablations
def test_gradients_of_prefixes_are_those_of_the_plain_blocks(ablation: tuple[str, ...]) -> None:
    model, tokens = random_model(BERT4Rec, ablation), random_tokens(2, 7)
    positions = torch.tensor([2, 3, 4, 5, 6, 7, 9, 13])
    weights = torch.randn(len(positions), N_ITEMS, generator=torch.Generator().manual_seed(1))
    found = scores_at(model, model.encode_prefixes(tokens, positions, UNKNOWN[:2]))
    (found * weights).sum().backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    (plain_prefixes(model, tokens, positions) * weights).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-3, rtol=1e-3)


@models
def test_padding_and_other_rows_change_no_prefix(cls: type[BERT4Rec]) -> None:
    model, long, short = random_model(cls), random_tokens(1, 9), random_tokens(1, 4, seed=1)
    rows = torch.cat([long, torch.cat([short, torch.full((1, 5), PAD)], 1)])
    together = model.encode_prefixes(rows, torch.tensor([2, 8, 10, 12]), UNKNOWN[:2])
    alone = model.encode_prefixes(short, torch.tensor([1, 3]), UNKNOWN[:1])
    assert_same(together[2:], alone)


@models
@given(data=st.data())
@settings(max_examples=15)
def test_what_comes_later_does_not_change_a_prefix(cls: type[BERT4Rec], data: st.DataObject) -> None:
    model = random_model(cls)
    first, changed_at = data.draw(st.integers(0, 8)), data.draw(st.integers(0, 8))
    positions, history = torch.arange(first, 9), random_tokens(1, 9, seed=first)
    other = history.clone()
    other[0, changed_at] = (history[0, changed_at] + 1) % N_ITEMS
    with torch.no_grad():
        a, b = (model.encode_prefixes(each, positions, UNKNOWN[:1]) for each in (history, other))
    is_same = torch.isclose(a, b, atol=1e-6).all(1)
    assert is_same.tolist() == (positions < changed_at).tolist()


def test_items_before_the_first_query_see_both_sides() -> None:
    """Item 0 is read through its neighbour: whether that saw what follows it makes a difference."""
    model, history = random_model(), random_tokens(1, 9)
    with torch.no_grad():
        from_there_on = model.encode_prefixes(history, torch.tensor([5, 6]), UNKNOWN[:1])
        from_the_start = model.encode_prefixes(history, torch.arange(9), UNKNOWN[:1])[5:7]
    assert not torch.allclose(from_there_on, from_the_start, atol=1e-3)


@given(st.integers(1, 40), st.integers(1, 3), st.integers(0, 2**31))
@settings(max_examples=20)
def test_fused_prefix_attention_is_the_plain_one(length: int, heads: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, heads, length, 4)
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for _ in range(5)]
    exact = [each.detach().double().requires_grad_() for each in inputs]  # the plain way
    grad = torch.randn(shape, generator=generator)
    found, wanted = attend_to_prefixes(*inputs), attend_to_prefixes(*exact)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-4)
    found.backward(grad)
    wanted.backward(grad.double())
    for a, b in zip(inputs, exact, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, atol=1e-4, rtol=1e-3)


# Additive attention, of NARM and STAMP.


@pytest.mark.parametrize("at_once", [2**20, 40, 1])  # all in one part, some rows, one query
def test_additive_attention_in_parts_is_the_plain_one_with_its_gradients(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(additive, "AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(2)
    positions = torch.tensor([0, 3, 4, 6, 14])  # rows of five: three, one, and one query
    given_tensors = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((5, 4), (3, 5, 4), (4,), (3, 5, 2))
    ]
    queries, keys, v, values = given_tensors
    ours = additive_attention(queries, keys, v, values, positions)
    plain = []
    for i, flat in enumerate(positions.tolist()):
        row, t = divmod(flat, 5)
        weights = torch.stack([torch.sigmoid(queries[i] + keys[row, j]) @ v for j in range(t + 1)])
        plain.append(weights @ values[row, : t + 1])
    together = torch.stack(plain)
    torch.testing.assert_close(ours, together)
    weight = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    for mine, theirs in zip(
        torch.autograd.grad((ours * weight).sum(), given_tensors),
        torch.autograd.grad((together * weight).sum(), given_tensors),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)
