import pytest
import torch

from tests.kernels.numbers import eager as plain

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
    return plain.attention
