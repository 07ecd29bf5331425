import pytest
import torch


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
