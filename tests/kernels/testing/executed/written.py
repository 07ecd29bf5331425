"""PTX written by hand, and executed: what the tests of rules share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasttrain_kernels.testing.executed.context import execute_kernel
from fasttrain_kernels.testing.executed.launches import ExecutedLaunch
from fasttrain_kernels.testing.executed.machine import ExecutionOptions
from fasttrain_kernels.testing.executed.program import ExecutableKernel
from fasttrain_kernels.testing.executed.ptx import parse

HEADER = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel({params})
.reqntid {threads}
{{
.reg .pred %p<16>;
.reg .b16 %rs<32>;
.reg .b32 %r<128>;
.reg .b64 %rd<32>;
.reg .b64 %in<8>;
mov.u32 %r0, %tid.x;
{loads}
"""


def ptx(body: str, tensors: int, threads: int = 32) -> str:
    """A kernel: %in0 ... are the addresses of its tensors, %r0 is the thread."""
    params = ", ".join(f".param .u64 .ptr .global .align 1 param_{i}" for i in range(tensors))
    loads = "\n".join(f"ld.param.b64 %in{i}, [param_{i}];" for i in range(tensors))
    return HEADER.format(params=params, threads=threads, loads=loads) + body + "\nret;\n}\n"


def run(
    body: str, *tensors: Tensor, threads: int = 32, blocks: int = 1, shared: int = 0, **options: Any
) -> ExecutedLaunch:
    """Execute a body; tensors are changed in place."""
    program = ExecutableKernel(parse(ptx(body, len(tensors), threads)))
    arguments = [("*i32", tensor) for tensor in tensors]
    return execute_kernel(program, (blocks, 1, 1), arguments, shared, ExecutionOptions(**options))


def address(of: str, into: str = "%rd0", thread: str = "%r0", size: int = 4) -> str:
    """The element of this thread."""
    return f"mul.wide.u32 {into}, {thread}, {size};\nadd.s64 {into}, {into}, {of};\n"


BITS = {"pred": 32, "f16": 16, "bf16": 16, "e4m3x2": 16, "e5m2x2": 16, "f16x2": 32, "bf16x2": 32, "f32x2": 64}
FLOATS = {
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64, "f16x2": torch.float16,
    "bf16x2": torch.bfloat16, "f32x2": torch.float32, "e4m3x2": torch.float8_e4m3fn, "e5m2x2": torch.float8_e5m2,
}  # fmt: skip


def width(kind: str) -> int:
    return BITS.get(kind) or int("".join(c for c in kind if c.isdigit()))


def register(kind: str, number: int) -> str:
    names = {16: "%rs", 32: "%r1", 64: "%rd1"}  # %r10 ..., %rd10 ...
    return f"{names[max(16, width(kind))]}{number}"


def encode(kind: str, values: list) -> np.ndarray:
    """Numbers as the 64 bits that a lane loads its operand from."""
    bits = np.zeros(len(values), np.uint64)
    if kind in FLOATS:
        numbers = torch.tensor(values, dtype=torch.float64).to(FLOATS[kind]).contiguous()
        raw = numbers.view(torch.uint8).reshape(len(values), -1).numpy()
        bits.view(np.uint8).reshape(len(values), 8)[:, : raw.shape[1]] = raw
    else:
        bits[:] = [int(value) & ((1 << 64) - 1) for value in values]
    return bits


def decode(kind: str, bits: np.ndarray) -> list:
    if kind == "pred":
        return [bool(value) for value in bits]
    if kind in FLOATS:
        raw = np.ascontiguousarray(bits.view(np.uint8).reshape(len(bits), 8)[:, : width(kind) // 8])
        numbers = torch.from_numpy(raw).view(FLOATS[kind]).double()
        return numbers.squeeze(-1).tolist() if not kind.endswith("x2") else [tuple(pair) for pair in numbers.tolist()]
    mask = (1 << width(kind)) - 1
    signed = kind[0] == "s"
    values = [int(value) & mask for value in bits]
    return [value - (mask + 1) if signed and value > mask // 2 else value for value in values]


def compute(opcode: str, result: str, sources: list[str], *operands: list, **options: Any) -> list:
    """Results of one instruction: lane i computes with the i-th number of each operand; "#2" is an immediate."""
    lanes = len(operands[0])
    body, names, tensors = "", [], [torch.zeros(32, dtype=torch.int64)]
    for number, (kind, values) in enumerate(zip(sources, operands, strict=True)):
        if kind.startswith("#"):
            names.append(kind[1:])
            continue
        padded = np.resize(encode("b32" if kind == "pred" else kind, values), 32)
        tensors.append(torch.from_numpy(padded.view(np.int64).copy()))
        name = register(kind, number + 1)
        body += address(f"%in{len(tensors) - 1}", size=8) + f"ld.global.b{max(16, width(kind))} {name}, [%rd0];\n"
        if kind == "pred":
            body += f"setp.ne.s32 %p{number + 1}, {name}, 0;\n"
            name = f"%p{number + 1}"
        names.append(name)
    to = "%p0" if result == "pred" else register(result, 0)
    body += f"{opcode} {to}, {', '.join(names)};\n"
    if result == "pred":
        body += "selp.b32 %r10, 1, 0, %p0;\n"
        to = "%r10"
    body += address("%in0", size=8) + f"st.global.b{max(16, width(result))} [%rd0], {to};\n"
    run(body, *tensors, **options)
    return decode(result, tensors[0].numpy().view(np.uint64)[:lanes])
