import pytest
import torch

from fasttrain_kernels.attention.reference import visible_keys

# 400 tokens: documents of length 5, 0, 65, 1, 129 (across tile borders) and 200 (across the border of the batch)
CU_SEQLENS = [0, 5, 5, 70, 71, 200, 400]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def make():
    """q, k and v by name, as assert_accurate takes them."""

    def make(
        batch: int = 1,
        queries: int = 130,
        keys: int | None = None,
        heads: int = 2,
        kv_heads: int = 1,
        dim: int = 16,
        dtype: torch.dtype = torch.float32,
        size: float = 1.0,
    ) -> dict[str, torch.Tensor]:
        def tensor(tokens: int, count: int) -> torch.Tensor:
            return (torch.randn(batch, tokens, count, dim) * size).to(dtype).requires_grad_()

        keys = queries if keys is None else keys
        return dict(q=tensor(queries, heads), k=tensor(keys, kv_heads), v=tensor(keys, kv_heads))

    return make


@pytest.fixture
def cu_seqlens():
    return torch.tensor(CU_SEQLENS, dtype=torch.int32)


@pytest.fixture
def eager():
    return softmax_attention


def softmax_attention(q, k, v, causal=True, window=None, cu_seqlens=None, softcap=None, scale=None):
    """What people write: all scores, in the dtype of the inputs. The measure of accuracy."""
    batch, tokens, heads, dim = q.shape
    if cu_seqlens is not None:
        q, k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
    q, k, v = q.transpose(1, 2), *(x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = visible_keys(q.shape[2], k.shape[2], causal, window, cu_seqlens, q.device)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).where(visible.any(-1, keepdim=True), 0.0)
    return (weights @ v).transpose(1, 2).reshape(batch, tokens, heads, dim)
