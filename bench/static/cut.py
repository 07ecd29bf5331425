"""Linear cross-entropy of cut-cross-entropy: pip install -e '.[rivals]'.

Its kernels hold the logits in registers and never write them; the matrix products are in the kernels. Its gradient
filter skips blocks by their values, which no static analysis knows: it is off, so that these are figures of the whole
work. B tokens, V vocabulary, D features.
"""

from __future__ import annotations

import torch
from cut_cross_entropy.cce_backward import cce_backward_kernel
from cut_cross_entropy.cce_lse_forward import cce_lse_forward_kernel
from cut_cross_entropy.indexed_dot import indexed_neg_dot_forward_kernel

from bench.static.cases import LINEAR, Backward, Case, Sizes, fresh, targets


def _run(s: Sizes) -> Backward:
    e, c = fresh(s["M"], s["D"]), fresh(s["V"], s["D"])
    labels = targets(s["M"])
    lse = cce_lse_forward_kernel(e, c)
    loss = indexed_neg_dot_forward_kernel(e, c, labels, out_dtype=torch.float32).add_(lse).mean()
    dloss = torch.empty_like(loss)
    return lambda: cce_backward_kernel(
        dloss, e, c, lse, None, None, None, targets=labels, shift=False, grad_scale=1 / s["M"]
    )


CUT = [Case("cut-cross-entropy", shape, _run, locks=True) for shape in LINEAR]
