import pytest

from fasttrain_kernels.linear_cross_entropy import rows, sweep


@pytest.fixture
def short_chunks(monkeypatch):
    """64 rows per chunk and 64 columns per block, so that small problems have several of both."""
    monkeypatch.setattr(sweep, "_ROW_MULTIPLE", 16)
    monkeypatch.setattr(sweep, "_TRITON_ROWS", 64)
    monkeypatch.setattr(sweep, "_CPU_ROWS", 64)
    monkeypatch.setattr(rows, "_BLOCK", 64)
    monkeypatch.setattr(rows, "_BLOCK_TWO_PASSES", 64)
