"""The GPUs of gpus.toml, by name or by what the driver calls a card. Nothing here needs a GPU, or torch."""

import difflib
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("gpus.toml")
# With one of these in its name, a card is not the one of the table
_OTHER_CARDS = {"MIG", "Laptop", "Ti", "D", "SUPER"}
_UNITS = {  # of the figures in the table
    "memory": 2**30, "half": 1e12, "tf32": 1e12, "fp32": 1e12, "bandwidth": 1e9, "link": 1e9, "network": 1e9 / 8,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, in bytes, bytes per second and FLOP per second."""

    name: str
    device: str  # words of the name that the driver gives it
    architecture: str
    memory: float
    half: float
    tf32: float
    fp32: float
    bandwidth: float
    link: float  # between the GPUs of a node, each way
    node: int  # GPUs of the usual node
    network: float  # of the usual node
    price: float | None = None  # USD per hour
    published: tuple[tuple[float, float, str], ...] = ()  # MFU, billions of parameters, the run and its source

    def peak(self, precision: str) -> float:
        """FLOP/s of matmuls in bf16, fp16 or fp32."""
        return self.fp32 if precision == "fp32" else self.half


@cache
def gpus() -> dict[str, Gpu]:
    """All of the table, by name."""
    return {
        name: Gpu(name=name, **{key: value * _UNITS.get(key, 1) for key, value in row.items()})
        for name, row in _table().items()
        if isinstance(row, dict)
    }


def prices_from() -> str:
    """Whose prices they are, and of when."""
    return _table()["prices"]


def find_gpu(name: str) -> Gpu:
    """A GPU by its name in the table; an error that names the nearest otherwise."""
    key = name.lower().replace("_", "-").replace(" ", "-")
    if key in gpus():
        return gpus()[key]
    alike = [other for other in gpus() if key in other] or difflib.get_close_matches(key, gpus(), n=3)
    hint = f"did you mean {' or '.join(alike)}?" if alike else f"there are {', '.join(gpus())}"
    raise ValueError(f"there is no GPU {name!r}; {hint} (add one to {TABLE})")


def gpu_of_device(device: str) -> Gpu | None:
    """The GPU that a driver calls by this name, as "NVIDIA H100 80GB HBM3"."""
    words = set(re.split(r"\W+", device))
    if words & _OTHER_CARDS:
        return None
    return next((gpu for gpu in gpus().values() if set(gpu.device.split()) <= words), None)


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text("utf-8"))
