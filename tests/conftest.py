import importlib
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch


def _has_triton() -> bool:
    try:
        return bool(importlib.import_module("triton"))
    except ImportError:
        return False


class _Module(pytest.Module):
    """Tests that import triton skip, with the reason, where there is none."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            if "triton" in str(error) and not _has_triton():
                pytest.skip("needs triton")
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return _Module.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu skip, with the reason, where there is none."""
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a GPU (make test-gpu)")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test logs to a server, whoever is logged in."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run measures this machine's speed, for a third of a second: longer than most runs of tests take otherwise."""
    monkeypatch.setattr("fasttrain.metrics.hardware._SECONDS", 0.0)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
