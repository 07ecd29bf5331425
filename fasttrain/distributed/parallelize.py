"""How one model runs on many devices: recompute, compile, shard, in this order, block by block.

    block.forward  ->  recomputed in backward  ->  compiled to one graph  ->  its weights gathered around it (FSDP2)

A block's forward is wrapped in place. No wrapper module appears, so parameters keep their names with every setting, and
checkpoints of one setting load with another.

On one GPU, where nothing happens between blocks, all of them are one graph: calling a compiled block, forward and
backward, takes the host more time than its launches do. The graph calls one region once a block, so that it is compiled
in the time of one block.

The embedding, the first norm and the head are one group, the root's, whose weights stay gathered from the beginning of
forward to the end of backward: with a tied head, both ends of a step need them. Gradients are summed over ranks, not
averaged: the loss is divided by the valid tokens of all ranks before backward (fasttrain.train.step).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fasttrain import config
from fasttrain.distributed.cast_weights import cast_weights
from fasttrain.distributed.runtime import Runtime, missing_compiler
from fasttrain.model import Block, Decoder
from fasttrain_kernels.ops.linear import matmul

# FLOPs of a run on CPUs from which compiling, about 20 s, comes back: steps get 7 % faster in the recipe tiny, and more
# in larger models. 2e13 are about five minutes on two cores.
COMPILE_PAYS = 2e13
_INFERENCE = ("stats", "logits")  # the model's methods beside forward


def parallelize(model: Decoder, parallel: config.ParallelConfig, runtime: Runtime, *, compiled: bool) -> None:
    """Make a model on the meta device ready for its ranks. `to_empty` and weights follow."""
    model.pads_documents = parallel.cuda_graph
    num_parameters = sum(weight.numel() for weight in model.parameters())
    copies = runtime.dtype != torch.float32 and parallel.holds_copies(num_parameters)
    alone = runtime.world_size == 1 and (copies or runtime.dtype == torch.float32)  # nothing to shard
    together = compiled and alone and runtime.device.type == "cuda"
    if compiled:  # swiglu_linear is such a function: without this, each start would trace all blocks again
        functorch_config.autograd_cache_allow_custom_autograd_functions = True
    if together:
        _compile_stack(model, parallel.recompute)
    for block in () if together else model.blocks:
        forward = _recomputed(block.forward, parallel.recompute)
        block.forward = torch.compile(forward, fullgraph=True) if compiled else forward
    if alone and copies:
        cast_weights(model, runtime.dtype, units=[] if together else list(model.blocks), methods=_INFERENCE)
    if alone:
        return
    precision = MixedPrecisionPolicy(
        param_dtype=None if runtime.dtype == torch.float32 else runtime.dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the rotary table stays float32
    )
    for block in model.blocks:
        fully_shard(block, mesh=runtime.mesh, mp_policy=precision, reshard_after_forward=parallel.reshard_after_forward)
    fully_shard(model, mesh=runtime.mesh, mp_policy=precision, reshard_after_forward=False)
    for method in _INFERENCE:
        register_fsdp_forward_method(model, method)
    for unit in (model, *model.blocks):
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)
        # gloo has no scaled sum, and NCCL needs none
        unit.set_force_sum_reduction_for_comms(True)


def before_backward(model: Decoder, parallel: config.ParallelConfig, *, last: bool) -> None:
    """What the coming micro-batch, the last of its step or not, does with gradients and weights at its end."""
    if not isinstance(model, FSDPModule):
        return
    if parallel.grad_reduce == "last":
        model.set_requires_gradient_sync(last)
    else:
        model.set_requires_all_reduce(last)  # between groups; within one, every micro-batch reduces
    if not parallel.reshard_after_forward:
        model.set_reshard_after_backward(last)


def should_compile(parallel: config.ParallelConfig, runtime: Runtime, flops: float) -> tuple[bool, str]:
    """Whether the blocks of a run of so many FLOPs are compiled, and why."""
    missing = missing_compiler() if runtime.device.type == "cpu" else ""
    if parallel.compile == "on" and missing:
        raise ValueError(f"parallel.compile is on, but {missing}; install it, or set parallel.compile to auto or off")
    if parallel.compile != "off" and parallel.recompute != "none" and torch.__version__ >= TorchVersion("2.15"):
        fails = f"torch {torch.__version__} cannot compile blocks that are recomputed"
        if parallel.compile == "on":
            raise ValueError(f"parallel.compile is on, but {fails}; set parallel.compile to auto or off")
        return False, fails
    if parallel.compile != "auto":
        return parallel.compile == "on", f"parallel.compile is {parallel.compile}"
    if missing or runtime.device.type == "mps":
        return False, missing or "nobody has tried it on mps"
    if runtime.device.type == "cpu" and flops < COMPILE_PAYS:
        return False, "the run is too short to pay for it"
    return True, "auto"


def _recomputed(forward: Callable[..., Any], recompute: str) -> Callable[..., Any]:
    if recompute == "none":
        return forward
    return functools.partial(checkpoint, forward, use_reentrant=False, **_RECOMPUTE[recompute])


def _compile_stack(model: Decoder, recompute: str) -> None:
    forward = _recomputed(Block.forward, recompute)

    # The block is an argument: torch takes two closures over blocks for one region, with the weights of the first.
    @torch.compiler.nested_compile_region
    def region(block: Block, *args: Any) -> Any:
        return forward(block, *args)

    for block in model.blocks:
        block.forward = functools.partial(region, block)
    options = _ONE_GRAPH if model.config.dropout or model.config.attention_dropout else _ONE_GRAPH | _UNCHANGED
    model.stack = torch.compile(model.stack, fullgraph=True, options=options)  # type: ignore[method-assign]


def _saved(_: object, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Selective: matmuls and attention, the costly part of a block, are not computed again."""
    costly = op in _MATMULS or "attention" in str(op)
    return CheckpointPolicy.MUST_SAVE if costly else CheckpointPolicy.PREFER_RECOMPUTE


_aten = torch.ops.aten
_MATMULS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.linear.default, matmul}


# The one graph launches our kernels as it launches its own, without Triton's Python in between, and does not check
# shapes that no earlier code could have changed. Without dropout, nor does it ask modules whether they train.
_ONE_GRAPH: dict[str, Any] = {
    "static_launch_user_defined_triton_kernels": True,
    "size_asserts": False,
    "alignment_asserts": False,
}
_UNCHANGED: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": {},
    "selective": {"context_fn": functools.partial(create_selective_checkpoint_contexts, _saved)},
}
