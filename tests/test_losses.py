"""The blockwise cross-entropy is the plain one, to rounding."""

import pytest
import torch
import torch.nn.functional as F

from bert4rec.training import losses


@pytest.mark.parametrize(("n_asked", "n_items"), [(1, 2), (7, 100), (500, 3416), (40, 20_000)])
def test_loss_and_gradients_equal_the_plain_form(
    n_asked: int, n_items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "BLOCK_BYTES", 1 << 20)  # several blocks
    torch.manual_seed(0)
    h = torch.randn(n_asked, 16, requires_grad=True)
    weight = torch.randn(n_items, 16, requires_grad=True)
    bias = torch.randn(n_items, requires_grad=True)
    targets = torch.randint(0, n_items, (n_asked,))
    ours = losses.cross_entropy(h, weight, bias, targets)
    plain = F.cross_entropy(h @ weight.T + bias, targets)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    our_gradients = torch.autograd.grad(3 * ours, (h, weight, bias))
    plain_gradients = torch.autograd.grad(3 * plain, (h, weight, bias))
    for a, b in zip(our_gradients, plain_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_extreme_logits_stay_finite() -> None:
    h = torch.tensor([[1000.0, 0.0], [-1000.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    loss = losses.cross_entropy(h, weight, torch.zeros(3), torch.tensor([0, 0]))
    loss.backward()
    assert float(loss.detach()) == 1000.0
    assert h.grad is not None
    assert h.grad.isfinite().all()
