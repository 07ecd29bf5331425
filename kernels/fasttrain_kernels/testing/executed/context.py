"""The switch between GPU and execution on the CPU, and the arguments of a launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton import knobs
from triton.runtime.autotuner import Autotuner

from fasttrain_kernels.testing.autotuned import run_configuration
from fasttrain_kernels.testing.driver import OfflineDriver, active
from fasttrain_kernels.testing.executed.launches import ExecutedLaunch, ExecutedLaunches
from fasttrain_kernels.testing.executed.machine import SCHEDULES, ExecutionOptions, Machine
from fasttrain_kernels.testing.executed.memory import GAP, GLOBAL_BASE, Fault, GlobalArena
from fasttrain_kernels.testing.executed.program import ExecutableKernel
from fasttrain_kernels.testing.executed.ptx import Unsupported, parse
from fasttrain_kernels.testing.executed.tma import MAP_BYTES, TF32, TensorMap
from fasttrain_kernels.testing.executed.values import Array
from fasttrain_kernels.testing.poison import poisoned_memory
from fasttrain_kernels.testing.targets import target_named

_programs: dict[str, ExecutableKernel] = {}  # by their PTX
_OUTSIDE = 0xFF  # between tensors: NaN, and no valid index


@contextlib.contextmanager
def execute(
    target: str,  # "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"
    *,
    schedule: str = "lockstep",  # of warps: also "forward", "reverse", "random" (with a seed)
    seed: int = 0,
    approximations: str = "exact",  # or "worst": the largest error that the PTX manual allows
    asynchronous: str = "late",  # or "early": when tcgen05 matmuls are formed
    collisions: str = "last",  # or "first": the lane that wins, where lanes store different values to one address
    poison: int | None = None,  # byte of uninitialised shared memory and registers
    races: bool = True,
    bank_conflicts: bool = True,
    config: int = 0,  # which of an autotuned kernel's configurations runs
    multiprocessors: int | None = None,  # that ops of this library see
    rewrite: Callable[[str], str] | None = None,  # changes the PTX before it is executed
    pointees: Sequence[Tensor] = (),  # that kernels reach by addresses in memory, not by arguments
) -> Iterator[ExecutedLaunches]:
    """Compile every @triton.jit kernel that is launched in the block for `target`, execute its PTX on the CPU tensors,
    and yield the list of launches.

    Raises Fault where a kernel does what no hardware defines, and Unsupported at an instruction without a rule.
    """
    limits = target_named(target)
    if limits.backend != "cuda":
        raise ValueError(f"execute: target {target} has no PTX; NVIDIA's have: sm_80, sm_90, ...")
    for name, value, allowed in (
        ("schedule", schedule, SCHEDULES), ("approximations", approximations, ("exact", "worst")),
        ("asynchronous", asynchronous, ("late", "early")), ("collisions", collisions, ("last", "first")),
    ):  # fmt: skip
        if value not in allowed:
            raise ValueError(f"execute: {name} {value!r} must be one of {', '.join(map(repr, allowed))}")
    options = ExecutionOptions(
        schedule=schedule, seed=seed, worst_case=approximations == "worst", early=asynchronous == "early",
        first_wins=collisions == "first", races=races, bank_conflicts=bank_conflicts,
    )  # fmt: skip
    if poison is not None:
        options = options.poisoned(poison)
    launches = ExecutedLaunches()
    executing = _ExecutingDriver(limits, launches, options, rewrite, pointees)
    with contextlib.ExitStack() as stack:
        stack.enter_context(knobs.runtime.scope())
        knobs.runtime.add_stages_inspection_hook = _without_binary
        stack.enter_context(_one_configuration(config))
        stack.enter_context(poisoned_memory())
        stack.enter_context(active(executing, limits, multiprocessors=multiprocessors))
        yield launches


def _without_binary(*arguments: Any) -> tuple[str, str]:
    """Triton's hook: asked for a key of its cache, and then to change the stages of a compilation."""
    if arguments:
        _, stages, *_ = arguments
        stages["cubin"] = lambda source, metadata: b"executed from PTX"  # no ptxas: the longest part
    return "executed", "executed"


@contextlib.contextmanager
def _one_configuration(config: int) -> Iterator[None]:
    before = Autotuner.run
    Autotuner.run = lambda self, *args, **kwargs: run_configuration(self, config, "execute", *args, **kwargs)
    try:
        yield
    finally:
        Autotuner.run = before


class _ExecutingDriver(OfflineDriver):
    def __init__(
        self, limits: Any, launches: ExecutedLaunches, options: ExecutionOptions,
        rewrite: Callable[[str], str] | None, pointees: Sequence[Tensor],
    ) -> None:  # fmt: skip
        super().__init__(limits, "executing", max_shared=limits.shared_per_block)
        self.launches, self.options, self.rewrite, self.pointees = launches, options, rewrite, pointees

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        text = self.stages[metadata.hash]["ptx"].read_text()
        program = _program(text)
        if self.rewrite and (changed := self.rewrite(text)) != text:
            program = ExecutableKernel(parse(changed))  # of many mutants, none is kept
        if getattr(metadata, "num_ctas", 1) > 1:
            raise Unsupported(f"{metadata.name}: clusters")

        def launch(x: int, y: int, z: int, stream: Any, function: Any, packed: Any, *rest: Any) -> None:
            _, _, _, *values = rest  # launch metadata, two hooks
            arguments = _flat(source.signature.values(), values, list(getattr(metadata, "tensordesc_meta", None) or []))
            for name in ("global_scratch_size", "profile_scratch_size"):  # of a program; the last two parameters
                size = getattr(metadata, name, 0) * x * y * z
                arguments.append(("*i8", torch.zeros(size, dtype=torch.int8)) if size else ("i64", 0))
            grid, name = (x, y, z), metadata.name
            self.launches.append(
                execute_kernel(program, grid, arguments, metadata.shared, self.options, name, self.pointees)
            )

        return launch


def _program(text: str) -> ExecutableKernel:
    if text not in _programs:
        _programs[text] = ExecutableKernel(parse(text))
    return _programs[text]


def _flat(kinds: Iterable[Any], values: Iterable[Any], maps: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Triton's types and values of the arguments that a kernel gets; tuples and descriptors are spread."""
    found: list[tuple[str, Any]] = []
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple):
            found += _flat(kind, value, maps)
        elif kind.startswith("tensordesc"):
            found += _descriptor(kind, value, maps.pop(0) if maps else None)
        elif kind != "constexpr":
            found.append((kind, value))
    return found


def _descriptor(kind: str, value: Any, layout: dict[str, Any] | None) -> list[tuple[str, Any]]:
    """The arguments that a host's tensor descriptor becomes: a tensor map, or a pointer where the target has none."""
    sizes, strides = [("i64", size) for size in value.shape], [("i64", stride) for stride in value.strides]
    following: list[tuple[str, Any]] = [*(("i32", size) for size in value.shape), *strides]
    nan = value.padding == "nan"
    if layout is None:
        pointer = "*" + kind.removeprefix("tensordesc<").split("[")[0]
        return [(pointer, value.base), *sizes, *strides, ("i1", nan), ("i1", value.round_f32_to_tf32), *following]
    if layout["fp4_padded"] or layout.get("is_im2col"):
        raise Unsupported(f"a tensor descriptor {layout}")
    bytes_of = [stride * layout["elem_size"] for stride in value.strides]
    described = TensorMap(
        0, TF32 if value.round_f32_to_tf32 else layout["elem_type"], tuple(value.shape)[::-1],
        tuple(bytes_of[:-1])[::-1], tuple(layout["block_size"])[::-1], layout["swizzle"], int(nan),
    )  # fmt: skip
    return [("map", (value.base, described)), *following]


def execute_kernel(
    program: ExecutableKernel, grid: tuple[int, int, int], arguments: list[tuple[str, Any]], shared: int,
    options: ExecutionOptions, name: str = "", pointees: Sequence[Tensor] = (),
) -> ExecutedLaunch:  # fmt: skip
    """Launch a kernel with arguments of Triton's types: "*fp32", "i32", ..."""
    tensors = [_tensor(value) for kind, value in arguments if kind.startswith("*")]
    maps = [value for kind, value in arguments if kind == "map"]
    encoded = [(_map_memory(), tensor, described) for tensor, described in maps]
    tensors += [tensor for held, tensor, _ in encoded for tensor in (held, tensor)]
    tensors += pointees
    memory, base = _arena(tensors, options)
    for tensor in pointees:
        start = tensor.untyped_storage().data_ptr()
        memory.hosts.append((start, tensor.untyped_storage().nbytes(), base[start]))
    memory.only_blocks = program.specialised
    for held, tensor, described in encoded:
        at = base[held.untyped_storage().data_ptr()]
        words = replace(described, address=_bits(tensor, "*", base)).encode()
        memory.bytes[at : at + len(words)] = words
    arguments = [(kind, encoded.pop(0)[0] if kind == "map" else value) for kind, value in arguments]
    params = dict.fromkeys((name for name, _ in program.kernel.params), 0)
    for (param, _), (kind, value) in zip(program.kernel.params, arguments, strict=False):
        params[param] = _bits(value, kind, base)
    try:
        return Machine(program, memory, shared, options).launch(grid, params)
    except (Fault, Unsupported) as error:
        raise type(error)(f"{name or program.kernel.name}: {error}") from error
    finally:
        for tensor in tensors:
            start, stored = base[tensor.untyped_storage().data_ptr()], _bytes(tensor)
            stored[:] = memory.bytes[start : start + len(stored)]


def _map_memory() -> Tensor:
    """Where a tensor map lies."""
    return torch.zeros(MAP_BYTES, dtype=torch.uint8)


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else value.base  # triton.reinterpret wraps


def _bits(value: Any, kind: str, base: dict[int, int]) -> int:
    """An argument as it is passed to the kernel."""
    match kind:
        case "fp16" | "bf16" | "fp32":
            return int(np.float32(value).view(np.uint32))
        case "fp64":
            return int(np.float64(value).view(np.uint64))
    if kind.startswith("*"):
        tensor = _tensor(value)
        start = tensor.untyped_storage().data_ptr()
        return GLOBAL_BASE + base[start] + tensor.data_ptr() - start
    if kind == "map":  # a parameter's address
        return base[value.untyped_storage().data_ptr()]
    if kind[0] not in "iu":
        raise Unsupported(f"an argument of type {kind}")
    return int(value) & ((1 << 64) - 1)


def _arena(tensors: list[Tensor], options: ExecutionOptions) -> tuple[GlobalArena, dict[int, int]]:
    """The memory of a launch, and where each storage begins in it. What lies outside of the views is not allowed."""
    base: dict[int, int] = {}
    size = GAP
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in base:
            # As aligned as the storage is: Triton assumes 16 bytes only where the address has them.
            base[storage.data_ptr()] = size + storage.data_ptr() % 256
            size += -(-storage.nbytes() // 256) * 256 + 256 + GAP
    memory = GlobalArena(size, races=options.races, first_wins=options.first_wins)
    memory.bytes[:] = _OUTSIDE
    for tensor in tensors:
        storage = tensor.untyped_storage()
        start, stored = base[storage.data_ptr()], _bytes(tensor)
        memory.bytes[start : start + len(stored)] = stored
        first, item = start + tensor.data_ptr() - storage.data_ptr(), tensor.element_size()
        strides = (*(stride * item for stride in tensor.stride()), 1)
        view = np.lib.stride_tricks.as_strided(memory.allowed[first:], (*tensor.shape, item), strides)
        view[...] = True
    return memory, base


def _bytes(tensor: Tensor) -> Array:
    """The bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
