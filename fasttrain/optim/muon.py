"""Muon: momentum, orthogonalised, for the matrices of a network; AdamW for its other parameters.

    buffer = momentum * buffer + (1 - momentum) * gradient
    update = orthogonalise(momentum * buffer + (1 - momentum) * gradient)        (Nesterov's look-ahead)
    weight = (1 - lr * weight_decay) * weight - lr * adjustment * update

This is the arithmetic of torch.optim.Muon, which as it stands

- iterates in bf16: on a CPU without bf16 units that costs about 50 times as much as fp32;
- takes a packed projection (queries, keys and values in one weight) for one matrix;
- all-gathers three times in each of five iterations under fully_shard, and then does the same work on every rank.

Here a sharded matrix travels twice. Matrices are taken in rounds of one for each rank, alike in size: one all-to-all
brings every rank the whole of its matrix, a second one brings every shard its part of the update, and both travel
while others are being worked on. With P elements in matrices over W ranks, a rank sends 2 * P / W elements and does
1 / W of the work in a step. The groups of HSDP do the same work as each other. On a GPU several rounds are one batch:
a rank iterates its matrices of one shape together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fasttrain.config import OptimConfig
from fasttrain.model import plain_name
from fasttrain.optim import adamw
from fasttrain.optim.optimizer import local
from fasttrain.optimizers import BATCH
from fasttrain_kernels.ops.linear import matmul_out

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # torch.optim.Muon's: the steepest start that still ends near 1
ITERATIONS = 5
EPS = 1e-7
# torch's SGD of many tensors in one pass, which changes nothing where a gradient is not finite
_SGD: Any = dict(momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False, is_first_step=False)

Adjust = Literal["original", "match_rms_adamw"]


def make(model: nn.Module, optim: OptimConfig, device: torch.device) -> Muon:
    """Muon for the matrices of blocks, which are what an nn.ModuleList holds, and AdamW for the rest.

    A module that packs several matrices in one parameter declares their rows as `muon_splits`, with names relative to
    itself: {"qkv.weight": (512, 128, 128)}.
    """
    matrices = _matrices(model)
    others = adamw.groups((p for p in model.parameters() if p not in matrices), optim)
    fused, batched = adamw.is_fused(device), device.type == "cuda"
    return Muon(matrices, others, adjust=optim.muon_adjust, fused=fused, batched=batched, **settings(optim, "muon"))


def settings(optim: OptimConfig, group: str) -> dict[str, Any]:
    if group != "muon":
        return adamw.settings(optim, group)
    return dict(lr=optim.muon_lr, momentum=optim.muon_momentum, weight_decay=optim.weight_decay)


def _matrices(model: nn.Module) -> dict[Tensor, tuple[int, ...]]:
    """Muon's parameters, each with the rows of the matrices packed in it."""
    modules = {plain_name(name): module for name, module in model.named_modules()}
    lists = tuple(f"{name}." for name, module in modules.items() if isinstance(module, nn.ModuleList))
    named = {plain_name(name): p for name, p in model.named_parameters()}  # a tied parameter once
    matrices = {name: p for name, p in named.items() if p.ndim == 2 and name.startswith(lists)}
    splits = {
        f"{name}.{parameter}".removeprefix("."): tuple(rows)
        for name, module in modules.items()
        for parameter, rows in getattr(module, "muon_splits", {}).items()
    }
    for name, rows in splits.items():
        if name not in matrices:
            raise ValueError(f"muon_splits: {name} is not the name of a 2-D parameter of a block")
        if sum(rows) != matrices[name].size(0):
            raise ValueError(f"muon_splits: {name} {rows} must add up to its {matrices[name].size(0)} rows")
    if not any(p.requires_grad for p in matrices.values()):
        raise ValueError('optim.kind "muon": no 2-D parameter in an nn.ModuleList to train; use optim.kind "adamw"')
    return {p: splits.get(name, (p.size(0),)) for name, p in matrices.items() if p.requires_grad}


def orthogonalise(matrix: Tensor, *, scale: float = 1.0) -> Tensor:  # (M, N) -> (M, N), or a stack (B, M, N)
    """About scale * U @ V.T of matrix = U @ S @ V.T, by Newton-Schulz iterations in the matrix's dtype."""
    a, b, c = COEFFICIENTS
    x = matrix.mT if matrix.size(-2) > matrix.size(-1) else matrix  # the matmul below is as small as it can be
    # The Frobenius norm bounds the largest singular value.
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for iteration in range(ITERATIONS):
        gram = _add_matmul(None, x, x.mT)
        polynomial = _add_matmul(gram, gram, gram, beta=b, alpha=c)
        factor = scale if iteration == ITERATIONS - 1 else 1.0
        x = _add_matmul(x, polynomial, x, beta=factor * a, alpha=factor)
    return x.mT if matrix.size(-2) > matrix.size(-1) else x


def _add_matmul(x: Tensor | None, a: Tensor, b: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """beta * x + alpha * a @ b. Of stacks, baddbmm would copy x first, as long as adding it later takes."""
    if a.ndim == 3:
        product = a.new_empty(len(a), a.size(1), b.size(2)).baddbmm_(a, b, beta=0, alpha=alpha)
        return product if x is None else product.add_(x, alpha=beta)
    if a.device.type != "cpu" or a.dtype != torch.float32:
        return a @ b if x is None else torch.addmm(x, a, b, beta=beta, alpha=alpha)
    out = a.new_empty(a.size(0), b.size(1)) if x is None else beta * x
    matmul_out(a if alpha == 1 else alpha * a, b, out, accumulate=x is not None)  # on a CPU the faster one
    return out


def adjustment(matrix: Tensor, adjust: Adjust) -> float:
    """What an update is multiplied by, so that one learning rate fits matrices of every shape.

    original: an update changes outputs by as much at any width, so a learning rate tuned on a narrow model suits a wide
    one. match_rms_adamw: an update's elements are as large as AdamW's usually are, so AdamW's learning rate suits.
    """
    rows, columns = matrix.shape
    return math.sqrt(max(1, rows / columns)) if adjust == "original" else 0.2 * math.sqrt(max(rows, columns))


class Muon(torch.optim.Optimizer):
    """Muon on `matrices` (parameter -> rows of the matrices packed in it), AdamW on the groups of `others`.

    One optimizer, so that a checkpoint holds one state, and a scaler that finds an infinite gradient skips it whole.
    """

    def __init__(
        self,
        matrices: Mapping[Tensor, Sequence[int]],
        others: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        adjust: Adjust = "original",
        fused: bool | None = None,
        batched: bool = False,
    ) -> None:
        self._rows = {p: list(rows) for p, rows in matrices.items()}
        self._adjust = adjust
        self._batched = batched
        self._ranks = _shard_group(list(matrices))
        self._adamw = adamw.AdamW(others, fused=fused) if others else None
        group = dict(name="muon", params=list(matrices), lr=lr, momentum=momentum, weight_decay=weight_decay)
        super().__init__([group, *(self._adamw.param_groups if self._adamw else [])], {})
        self._step_supports_amp_scaling = True  # a scaler gives it found_inf, for which the host would wait otherwise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        # Where gradients are not finite, this step changes nothing (skip_unless_finite).
        not_finite: Tensor | None = getattr(self, "found_inf", None)
        if (scale := getattr(self, "grad_scale", None)) is not None:  # of a scaler that has not unscaled gradients
            params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            torch._foreach_div_([local(p.grad) for p in params], scale)
        self._step_matrices(self.param_groups[0], not_finite)
        if self._adamw:
            self._adamw.found_inf = not_finite  # type: ignore[attr-defined]
            self._adamw.param_groups = self.param_groups[1:]  # ours may be new: load_state_dict replaces them
            self._adamw.state = self.state
            self._adamw.step()
        return loss

    def _step_matrices(self, group: dict[str, Any], not_finite: Tensor | None) -> None:  # (): 1 or 0
        params = sorted((p for p in group["params"] if p.grad is not None), key=Tensor.numel, reverse=True)
        size = self._ranks.size() if self._ranks else 1
        rounds = [_Round(params[i : i + size], self._ranks) for i in range(0, len(params), size)]
        batches: list[list[_Round]] = []
        while rounds:
            count = max(1, BATCH // rounds[0].params[0].numel()) if self._batched else 1
            batches, rounds = [*batches, rounds[:count]], rounds[count:]
        previous: list[_Round] = []
        for current, following in pairwise([*batches, []]):
            if not previous:
                self._gather(current, group, not_finite)
            matrices = [x for turn in current for p, whole in turn.matrix() for x in whole.split(self._rows[p])]
            if following and self._ranks:
                self._gather(following, group, not_finite)
            self._orthogonalise(matrices)
            for turn in current:
                turn.scatter()
            if previous:
                self._apply(previous, group, not_finite)  # has travelled while this batch was worked on
            previous = current if following and self._ranks else []
            if not previous:
                self._apply(current, group, not_finite)

    def _gather(self, batch: list[_Round], group: dict[str, Any], not_finite: Tensor | None) -> None:
        """Momentum, and on their way: this rank's shards of what is to be orthogonalised."""
        params, momentum = [p for turn in batch for p in turn.params], group["momentum"]
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        gradients = [local(p.grad) for p in params]
        buffers = [local(self.state[p]["momentum_buffer"]) for p in params]
        if self._batched:
            ahead = [*torch._foreach_mul(gradients, 1 - momentum)]
            # buffer = momentum * buffer + (1 - momentum) * gradient, ahead = ahead + momentum * buffer
            options = _SGD | dict(lr=-momentum, momentum=momentum, dampening=momentum, found_inf=not_finite)
            torch._fused_sgd_(ahead, gradients, buffers, **options)
        else:
            weight: Any = 1 - momentum
            if not_finite is not None:
                gradients = [x.where(not_finite == 0, 0) for x in gradients]
                weight = weight * (1 - not_finite)
            for gradient, buffer in zip(gradients, buffers, strict=True):
                buffer.lerp_(gradient, weight)
            ahead = [x.lerp(buffer, momentum) for x, buffer in zip(gradients, buffers, strict=True)]
        sizes = [x.numel() for x in ahead]
        shards = torch.empty(sum(sizes), dtype=_precision(ahead[0].device), device=ahead[0].device)
        torch._foreach_copy_(shards.split(sizes), [x.flatten() for x in ahead])
        for turn, sent in zip(batch, shards.split([turn.elements for turn in batch]), strict=True):
            turn.gather(sent)

    def _orthogonalise(self, matrices: list[Tensor]) -> None:
        """Each in its place: one after the other, or all of a shape as a stack."""
        stacks: dict[Any, list[Tensor]] = defaultdict(list)
        for number, matrix in enumerate(matrices):
            stacks[matrix.shape if self._batched else number].append(matrix)
        for stack in stacks.values():
            x, scale = torch.stack(stack) if len(stack) > 1 else stack[0], adjustment(stack[0], self._adjust)
            update = orthogonalise(x, scale=scale).contiguous()
            torch._foreach_copy_(stack, update.unbind() if len(stack) > 1 else [update])

    def _apply(self, batch: list[_Round], group: dict[str, Any], not_finite: Tensor | None) -> None:
        weights, lr, decay = [local(p) for turn in batch for p in turn.params], group["lr"], group["weight_decay"]
        updates = [update for turn in batch for update in turn.updates()]
        updates = [update.view_as(weight) for update, weight in zip(updates, weights, strict=True)]
        if self._batched:
            wide = [torch.empty_like(weight) for weight in weights]
            torch._foreach_copy_(wide, updates)
            torch._fused_sgd_(weights, wide, [], **_SGD | dict(lr=lr, weight_decay=decay, found_inf=not_finite))
            return
        finite = 1.0 if not_finite is None else 1 - not_finite
        for weight, update in zip(weights, updates, strict=True):
            weight.mul_(1 - lr * decay * finite).add_(update * finite, alpha=-lr)


class _Round:
    """Up to one matrix for each rank, on the way from the shards to the ranks that work on them, and back."""

    def __init__(self, params: list[Tensor], ranks: dist.ProcessGroup | None) -> None:
        rank, size = (ranks.rank(), ranks.size()) if ranks else (0, 1)
        self.params = params
        self.own = params[rank] if rank < len(params) else None
        self._ranks = ranks
        # Elements here of each rank's matrix, and on each rank of the own one
        self._shards = [local(p).numel() for p in params] + [0] * (size - len(params))
        self._pieces = [0] * size if self.own is None else _shard_sizes(self.own, size)
        self.elements = sum(self._shards)
        self._buffers: tuple[Tensor, ...] = ()  # sent and received; both have to live until the work is done
        self._work: dist.Work | None = None

    def gather(self, shards: Tensor) -> None:
        self._exchange(shards, self._shards, self._pieces)

    def matrix(self) -> list[tuple[Tensor, Tensor]]:
        """The own parameter and its whole matrix, or nothing: what is written to that is scattered."""
        arrived = self._arrived()
        return [] if self.own is None else [(self.own, arrived.view(self.own.shape))]

    def scatter(self) -> None:
        self._exchange(self._buffers[-1], self._pieces, self._shards)

    def updates(self) -> tuple[Tensor, ...]:
        arrived, self._buffers = self._arrived(), ()
        return arrived.split(self._shards)[: len(self.params)]

    def _exchange(self, send: Tensor, sends: list[int], receives: list[int]) -> None:
        if self._ranks is None:
            self._buffers = (send,)
            return
        receive = send.new_empty(sum(receives))
        self._buffers = (send, receive)
        self._work = dist.all_to_all_single(receive, send, receives, sends, group=self._ranks, async_op=True)

    def _arrived(self) -> Tensor:
        if self._work:
            self._work.wait()
        self._work = None
        return self._buffers[-1]


def _shard_group(params: list[Any]) -> dist.ProcessGroup | None:
    """The ranks that hold the shards of every parameter; None where a parameter is whole on its rank."""
    layouts = {(p.device_mesh, p.placements) if hasattr(p, "device_mesh") else None for p in params}
    if len(layouts) > 1:
        raise ValueError(f"Muon: all matrices must be sharded alike, and came as {', '.join(map(str, layouts))}")
    layout = layouts.pop()
    if layout is None:
        return None
    mesh, placements = layout
    sharded = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if len(sharded) > 1 or not all(placements[dim].is_shard(0) for dim in sharded):
        raise ValueError(f"Muon: matrices placed as {placements} cannot be gathered; shard their rows, once: Shard(0)")
    return mesh.get_group(sharded[0]) if sharded and mesh.size(sharded[0]) > 1 else None


def _shard_sizes(param: Tensor, size: int) -> list[int]:
    """Elements on each rank: Shard(0) cuts rows as torch.chunk does, and the last ranks may go short."""
    rows, columns = param.shape
    chunk = -(-rows // size)
    return [min(max(rows - rank * chunk, 0), chunk) * columns for rank in range(size)]


def _precision(device: torch.device) -> torch.dtype:
    """Of the iterations: bf16 is enough for them, where there are units for it."""
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if bf16 else torch.float32
