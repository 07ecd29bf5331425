import pytest
import torch
from torch import nn

from fasttrain_kernels.modules import LinearCrossEntropyLoss, RMSNorm, SwiGLU


def same_gradients(ours: nn.Module, theirs: nn.Module, x: torch.Tensor, *args) -> None:
    theirs.load_state_dict(ours.state_dict())
    grads = []
    for module in (ours, theirs):
        module.zero_grad()
        leaf = x.detach().requires_grad_()
        out = module(leaf, *args)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        grads.append([out.detach(), leaf.grad, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("shape", [32, (32,), (4, 8)])
@pytest.mark.parametrize("options", [{}, {"eps": 1e-3}, {"elementwise_affine": False}])
def test_rms_norm_is_a_drop_in_for_torchs(shape, options):
    ours, theirs = RMSNorm(shape, **options), nn.RMSNorm(shape, **options)
    if ours.weight is not None:
        nn.init.normal_(ours.weight)
    size = (3, 5, 32) if shape != (4, 8) else (3, 5, 4, 8)
    same_gradients(ours, theirs, torch.randn(size) * 3)


def test_rms_norm_names_a_wrong_shape():
    with pytest.raises(ValueError, match=r"^RMSNorm: input \(2, 31\) must end in normalized_shape \(32,\)$"):
        RMSNorm(32)(torch.randn(2, 31))


@pytest.mark.parametrize("bias", [False, True])
def test_swiglu_is_its_three_projections(bias):
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up, self.down = nn.Linear(16, 48, bias=bias), nn.Linear(24, 16, bias=bias)

        def forward(self, x):
            gate, up = self.gate_up(x).chunk(2, -1)
            return self.down(nn.functional.silu(gate) * up)

    same_gradients(SwiGLU(16, 24, bias=bias), Plain(), torch.randn(2, 7, 16))


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"ignore_index": 3}, {"label_smoothing": 0.1}])
def test_linear_cross_entropy_loss_is_a_drop_in_for_torchs(options):
    theirs = nn.LinearCrossEntropyLoss(16, 50, **options)
    target = torch.randint(50, (21,))
    target[4] = 3
    same_gradients(LinearCrossEntropyLoss(16, 50, **options), theirs, torch.randn(21, 16), target)


def test_linear_cross_entropy_loss_passes_its_options_on():
    loss = LinearCrossEntropyLoss(8, 20, z_loss=0.1, softcap=5.0, reduction="none")
    hidden, target = torch.randn(6, 8), torch.randint(20, (6,))
    logits = 5 * torch.tanh(hidden @ loss.linear.weight.T / 5)
    expected = nn.functional.cross_entropy(logits, target, reduction="none") + 0.1 * logits.logsumexp(-1) ** 2
    torch.testing.assert_close(loss(hidden, target), expected)
