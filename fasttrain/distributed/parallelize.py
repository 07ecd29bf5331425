"""How one model runs on many devices: recompute, compile, shard or replicate, in this order, unit by unit.

    block.forward  ->  recomputed in backward  ->  a unit's blocks compiled to one graph
                   ->  its weights gathered around it (FSDP2), or whole on every rank and its gradients added up

A unit is some blocks in a row: as many as are worth a collective, since calling a compiled graph, and FSDP around it,
take the host more time than a small block's launches do. On one GPU all blocks are one graph. In a graph, all blocks
call one region, so that it is compiled in the time of one block.

A block's forward is wrapped in place. No wrapper module appears, so parameters keep their names with every setting, and
checkpoints of one setting load with another.

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
from fasttrain.distributed.runtime import Runtime, missing_compiler
from fasttrain.distributed.unsharded import UnshardedWeights
from fasttrain.model import Block, Decoder, run_blocks
from fasttrain_kernels.ops.linear import matmul

# FLOPs of a run on CPUs from which compiling, about 20 s, comes back: steps get 7 % faster in the recipe tiny, and more
# in larger models. 2e13 are about five minutes on two cores.
COMPILE_PAYS = 2e13
_INFERENCE = ("stats", "logits")  # the model's methods beside forward


def parallelize(model: Decoder, parallel: config.ParallelConfig, runtime: Runtime, *, compiled: bool) -> None:
    """Make a model on the meta device ready for its ranks. `to_empty` and weights follow."""
    model.pads_documents = parallel.cuda_graph
    device, ranks = runtime.device.type, runtime.world_size
    num_parameters = sum(weight.numel() for weight in model.parameters())
    sharded = parallel.shards(ranks, num_parameters, device, precision=runtime.precision)
    blocks: list[Any] = list(model.blocks)
    size = sum(weight.numel() for weight in blocks[0].parameters()) * runtime.dtype.itemsize
    length = config.unit_blocks(len(blocks), size, device)
    together = compiled and device == "cuda" and ranks == 1 and not sharded
    _wrap(blocks, parallel.recompute, regions=together or (compiled and length > 1))
    units = [blocks[i : i + length] for i in range(0, len(blocks), length)]
    run: Callable[..., Any] = run_blocks
    if compiled:  # swiglu_linear is such a function: without this, each start would trace all blocks again
        functorch_config.autograd_cache_allow_custom_autograd_functions = True
    if together:
        _compile_stack(model)
    elif compiled:
        run = torch.compile(run, fullgraph=True, options=_options(model) if device == "cuda" else None)
    # The forward methods alone: FSDP's hooks are around a unit.
    model.units = [(len(unit), functools.partial(run, [block.forward for block in unit])) for unit in units]
    if sharded:
        _shard(model, units, parallel, runtime)
    elif ranks > 1 or runtime.dtype != torch.float32:
        # Gradients of one graph come at once: to part them would be more launches and no less memory.
        model.unsharded = UnshardedWeights(
            model,
            runtime.dtype,
            units=[] if together else units,
            methods=_INFERENCE,
            ranks=runtime.dp_group if ranks > 1 else None,
        )


def _wrap(blocks: list[Any], recompute: str, *, regions: bool) -> None:
    """What a block does in backward, and of a graph of several blocks, that they are one region of it."""
    forward: Callable[..., Any] = Block.forward
    if recompute != "none":
        forward = functools.partial(checkpoint, forward, use_reentrant=False, **_RECOMPUTE[recompute])
    if regions:
        # The block is an argument: torch takes two closures over blocks for one region, with the weights of the first.
        @torch.compiler.nested_compile_region
        def region(block: Block, *args: Any) -> Any:
            return inner(block, *args)

        inner, forward = forward, region
    for block in blocks:
        block.forward = functools.partial(forward, block)


def _shard(model: Decoder, units: list[list[Any]], parallel: config.ParallelConfig, runtime: Runtime) -> None:
    options: dict[str, Any] = dict(
        mesh=runtime.mesh,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=None if runtime.dtype == torch.float32 else runtime.dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # the rotary table stays float32
        ),
    )
    for number, unit in enumerate(units):
        fully_shard(unit, reshard_after_forward=parallel.reshard_after_forward, **options)
        length, unit[0].run = model.units[number]
        register_fsdp_forward_method(unit[0], "run")
        model.units[number] = length, unit[0].run
    fully_shard(model, reshard_after_forward=False, **options)
    for method in _INFERENCE:
        register_fsdp_forward_method(model, method)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo has no scaled sum, and NCCL needs none
            module.set_force_sum_reduction_for_comms(True)


def before_backward(model: Decoder, parallel: config.ParallelConfig, *, last: bool) -> None:
    """What the coming micro-batch, the last of its step or not, does with gradients and weights at its end."""
    if isinstance(unsharded := model.unsharded, UnshardedWeights):
        unsharded.reduces = last
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


def _saved(_: object, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Selective: matmuls and attention, the costly part of a block, are not computed again."""
    costly = op in _MATMULS or "attention" in str(op) or "flash_attn" in str(op)
    return CheckpointPolicy.MUST_SAVE if costly else CheckpointPolicy.PREFER_RECOMPUTE


_aten = torch.ops.aten
_MATMULS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.linear.default, matmul}


def _compile_stack(model: Decoder) -> None:
    model.stack = torch.compile(model.stack, fullgraph=True, options=_options(model))  # type: ignore[method-assign]


def _options(model: Decoder) -> dict[str, Any]:
    """On a GPU: a graph launches our kernels as it launches its own, without Triton's Python in between, and does not
    check shapes that no earlier code could have changed. Without dropout, nor does it ask modules whether they train.
    """
    dropout = model.config.dropout or model.config.attention_dropout
    unchanged = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
    return _GRAPH | ({} if dropout else unchanged)


_GRAPH: dict[str, Any] = {
    "static_launch_user_defined_triton_kernels": True,
    "size_asserts": False,
    "alignment_asserts": False,
}
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": {},
    "selective": {"context_fn": functools.partial(create_selective_checkpoint_contexts, _saved)},
}
