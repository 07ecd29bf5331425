"""Triton; or, where there is none (macOS, images for CPUs), what lets kernels be defined but not launched."""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError as _error:
    _reason = str(_error)

    class _Missing:
        """Stands for triton, its language and kernels: whatever is asked of it is again one of these."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self

        def __getitem__(self, grid: Any) -> Any:
            raise ImportError(f"a kernel cannot be launched without triton ({_reason}); pip install triton")

        @staticmethod
        def cdiv(x: int, y: int) -> int:
            return -(-x // y)

        @staticmethod
        def next_power_of_2(n: int) -> int:
            return 1 << (n - 1).bit_length() if n > 0 else 0

    triton = tl = libdevice = _Missing()

__all__ = ["libdevice", "tl", "triton"]
