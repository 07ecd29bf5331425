"""The ops as people write them in PyTorch, in the dtype of the inputs: the measure of accuracy.

Where sums decide the error, `order` shuffles the axes that are summed over, which changes nothing but rounding. None
leaves them as they are.
"""

import torch
import torch.nn.functional as F

from fasttrain_kernels import linear_cross_entropy_stats_reference, rms_norm_reference
from fasttrain_kernels._checks import wide
from fasttrain_kernels.ops.attention.reference import visible_keys
from fasttrain_kernels.ops.linear_cross_entropy.reference import loss_of_logits


def attention(q, k, v, causal=True, window=None, cu_seqlens=None, softcap=None, scale=None, *, order=None):
    """All scores at once. Shuffled: queries, keys, and the elements of heads."""
    batch, tokens, heads, dim = q.shape
    if cu_seqlens is not None:
        q, k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
    visible = visible_keys(q.shape[1], k.shape[1], causal, window, cu_seqlens, q.device)
    if order is not None:
        query, key, inner, outer = shuffles(order, q.shape[1], k.shape[1], dim, dim)
        q, k, v = q[:, query][..., inner], k[:, key][..., inner], v[:, key][..., outer]
        visible = visible[query][:, key]
    q, k, v = q.transpose(1, 2), *(x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).where(visible.any(-1, keepdim=True), 0.0)
    out = (weights @ v).transpose(1, 2)
    if order is not None:
        out = out[:, query.argsort()][..., outer.argsort()]
    return out.reshape(batch, tokens, heads, dim)


def rms_norm(x, weight=None, *, eps=1e-6, offset=0.0, order=None):
    """The reference, in the dtype of x. Shuffled: rows and features."""
    if order is None:
        return rms_norm_reference(x, weight, eps=eps, offset=offset)
    row, feature = shuffles(order, *x.shape)
    out = rms_norm_reference(x[row][:, feature], None if weight is None else weight[feature], eps=eps, offset=offset)
    return out[row.argsort()][:, feature.argsort()]


def linear_cross_entropy(hidden, weight, target, *, token_weight=None, order=None, **options):
    """Logits rounded to the operands' dtype, as nn.Linear leaves them, then float32. Shuffled: tokens and features."""
    if order is None:
        return loss_of_logits(wide(F.linear(hidden, weight)), target, token_weight=token_weight, **options)
    token, feature = shuffles(order, *hidden.shape)
    logits = wide(F.linear(hidden[token][:, feature], weight[:, feature]))
    token_weight = None if token_weight is None else token_weight[token]
    loss = loss_of_logits(logits, target[token], token_weight=token_weight, **options)
    return loss[token.argsort()] if loss.ndim else loss


def linear_cross_entropy_stats(hidden, weight, target, **options):
    """Stats of the same logits: the matmul with a unit matrix is exact."""
    logits = wide(F.linear(hidden, weight))
    return linear_cross_entropy_stats_reference(logits, torch.eye(len(weight)), target, **options)


def swiglu(gate, up):
    return F.silu(gate) * up


def swiglu_linear(gate_up, weight):
    return F.linear(swiglu(*gate_up.chunk(2, dim=-1)), weight)


def shuffles(order: int, *sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(order)
    return [torch.randperm(size, generator=generator) for size in sizes]
