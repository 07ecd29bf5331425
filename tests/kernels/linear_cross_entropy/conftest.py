import pytest

from fasttrain_kernels.ops.linear_cross_entropy import chunks, launch


@pytest.fixture
def short_chunks(monkeypatch):
    """64 tokens per chunk and 64 columns per block, so that small problems have several of both."""
    monkeypatch.setattr(chunks, "_TOKEN_MULTIPLE", 16)
    monkeypatch.setattr(chunks, "_TRITON_MAX_TOKENS", 64)
    monkeypatch.setattr(chunks, "_CPU_MAX_TOKENS", 64)
    monkeypatch.setattr(launch, "_BLOCK", 64)
    monkeypatch.setattr(launch, "_TWO_PASS_BLOCK", 64)
