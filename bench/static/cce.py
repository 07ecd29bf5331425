"""Linear cross-entropy of cut-cross-entropy: pip install -e '.[baselines]'.

Its kernels hold the logits in registers and never write them; the matmuls are in the kernels. Its gradient
filter skips blocks by their values, which no static analysis knows: it is off, so that these are figures of the whole
work. B tokens, V vocabulary, D features.

Both large kernels take eight blocks of tokens, go with them through all of the vocabulary, and take the next eight: the
weight, and in backward its gradient, comes from memory anew for every eight blocks.

It adds up gradients in their own 16 bits, and in bf16 the error grows with the vocabulary (tests/bench/test_static.py).
So there is a second case, the same kernels with float32 sums: what its later versions do for `cce_kahan_full_c`, which
they advise for pretraining.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from cut_cross_entropy.cce_backward import cce_backward_kernel
from cut_cross_entropy.cce_lse_forward import cce_lse_forward_kernel
from cut_cross_entropy.indexed_dot import indexed_neg_dot_forward_kernel
from cut_cross_entropy.tl_autotune import _cce_backward_best_config, _cce_forward_best_config
from triton import Config

from bench.static.cache import Operand, Tiling
from bench.static.cases import LINEAR, Backward, Sizes, StaticCase, fresh, targets
from bench.static.sources import with_replaced


def wide_backward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Its backward with float32 sums, rounded at the end."""
    function = with_replaced(
        cce_backward_kernel,
        ("torch.zeros_like(e)", "torch.zeros_like(e, dtype=torch.float32)"),
        ("dtype = e.dtype", "dtype = torch.float32"),
        ("return de, ", "return de.to(e.dtype), "),
    )
    return function(*args, **kwargs)


def _run(s: Sizes, backward: Callable[..., Any] = cce_backward_kernel) -> Backward:
    e, c = fresh(s["M"], s["D"]), fresh(s["V"], s["D"])
    labels = targets(s["M"])
    lse = cce_lse_forward_kernel(e, c)
    loss = indexed_neg_dot_forward_kernel(e, c, labels, out_dtype=torch.float32).add_(lse).mean()
    dloss = torch.empty_like(loss)
    return lambda: backward(dloss, e, c, lse, None, None, None, targets=labels, shift=False, grad_scale=1 / s["M"])


_GROUP = 8  # GROUP_B, in the source of both kernels
_E, _C = Operand("E", 0, 2), Operand("C", 1, 2)


def _forward(s: Sizes) -> Tiling:
    return Tiling(s["M"], s["V"], s["D"], _tile(_cce_forward_best_config()), ((_E, _C),), _GROUP)


def _backward(s: Sizes, itemsize: int) -> Tiling:
    """Logits again, then their gradient times C into dE, then times E into dC."""
    dE, dC = Operand("dE", 0, itemsize, added_to=True), Operand("dC", 1, itemsize, added_to=True)
    loops = ((_E, _C), (_C, dE), (_E, dC))
    return Tiling(s["M"], s["V"], s["D"], _tile(_cce_backward_best_config()), loops, _GROUP)


def _tile(config: Config) -> tuple[int, int]:
    return config.kwargs["BLOCK_B"], config.kwargs["BLOCK_V"]


def _tilings(itemsize: int) -> dict[str, Callable[[Sizes], Tiling]]:
    return {"_cce_lse_forward_kernel": _forward, "_cce_backward_kernel": partial(_backward, itemsize=itemsize)}


CCE = [StaticCase("cut-cross-entropy", shape, _run, locks=True, tilings=_tilings(2)) for shape in LINEAR]
CCE += [
    StaticCase(
        "cut-cross-entropy, fp32",
        shape,
        partial(_run, backward=wide_backward),
        locks=True,
        tilings=_tilings(4),
    )
    for shape in LINEAR
]
