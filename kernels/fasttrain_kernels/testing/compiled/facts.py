"""What a compiled kernel asks of the hardware, read from the binary itself.

NVIDIA: registers from cuobjdump, instructions from nvdisasm (both come with Triton). Spills are the widths of the
local-memory instructions, which is the figure that ptxas prints; it needs no compiler log, so that a kernel from
Triton's cache is as good as a fresh one. AMD: the assembly that Triton hands to its linker, with metadata at its end.

All counts are static: an instruction in a loop counts once. `loop_spills` says what is paid for in every round.
"""

from __future__ import annotations

import math
import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from fasttrain_kernels.testing.targets import Occupancy, Target, occupancy, target_named

_SMALL_BYTES = 1024  # what 64 lanes move in one 128-bit access; with less, some lanes have nothing to do
_REPLICAS = 4  # of an access in the binary: software pipelining repeats it before the loop, once per stage


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One kernel in one specialisation for one target. Bytes are per block (shared) or per lane (spills)."""

    kernel: str
    target: str
    num_warps: int
    registers: int  # per lane; AMD: VGPRs, accumulation registers included
    spill_stores: int
    spill_loads: int
    loop_spills: int  # the part of both that lies in a loop
    shared: int
    tensor_memory: int  # columns
    instructions: int
    loads: dict[int, int]  # bits per lane -> global loads to registers
    stores: dict[int, int]  # bits per lane -> global stores
    copies: dict[int, int]  # bits per lane -> asynchronous copies from global to shared memory
    tma: int  # bulk copies by the tensor memory accelerator
    dots: int  # matrix multiplications in the kernel's source
    small: int  # accesses in the source that are too small to be wide: one value per row, a short weight
    matrix: dict[str, int]  # "HMMA", "HGMMA", "UTCHMMA", "MFMA", ... -> instructions on the matrix units
    special: int  # exp, log, rsqrt, ...: a quarter of the rate of an addition, or less
    barriers: int  # of the whole block

    @property
    def limits(self) -> Target:
        return target_named(self.target)

    @property
    def occupancy(self) -> Occupancy:
        return occupancy(
            self.limits,
            num_warps=self.num_warps,
            registers=self.registers,
            shared=self.shared,
            tensor_memory=self.tensor_memory,
        )

    @property
    def fits(self) -> bool:
        """Whether one block can run at all."""
        return self.occupancy.blocks > 0

    @property
    def spills(self) -> bool:
        return self.spill_stores + self.spill_loads > 0

    @property
    def narrow_bulk(self) -> int:
        """Global accesses of less than 128 bits that no small access in the source explains."""
        narrow = sum(
            count
            for accesses in (self.loads, self.stores, self.copies)
            for bits, count in accesses.items()
            if bits < 128
        )
        return max(0, narrow - _REPLICAS * self.small)

    @property
    def wide_share(self) -> float:
        """The part of the global bytes that moves in accesses of 128 bits or more (bulk copies count as such)."""
        widths: Counter[int] = Counter({128: self.tma})
        for accesses in (self.loads, self.stores, self.copies):
            widths.update(accesses)
        total = sum(bits * count for bits, count in widths.items())
        return sum(bits * count for bits, count in widths.items() if bits >= 128) / total if total else 1.0


@dataclass(frozen=True)
class Binary:
    """A compiled kernel: Triton's metadata, and the texts and binary of its stages by extension."""

    metadata: Any
    stages: dict[str, Path]


def analyse(target: Target, binaries: Sequence[Binary]) -> list[Facts]:
    """The facts of many kernels at once: starting the disassembler takes longer than its work on a kernel."""
    if target.backend == "hip":
        return [_amd_facts(target, binary) for binary in binaries]
    listings = _disassemble(target, [_text_section(b.stages["cubin"].read_bytes()) for b in binaries])
    return [_nvidia_facts(target, b, listing) for b, listing in zip(binaries, listings, strict=True)]


_ACCESS = re.compile(r"\btt\.(?:load|store) .*? : (?:tensor<((?:\d+x)+))?!tt\.ptr<[a-z]+(\d+)")


def _dots(binary: Binary) -> int:
    return len(re.findall(r"\btt\.dot(?:_scaled)?\b", binary.stages["ttir"].read_text()))


def _small_accesses(target: Target, binary: Binary) -> int:
    """Accesses of less than _SMALL_BYTES in Triton's own IR, each counted as often as the lanes have to repeat it."""
    lanes = binary.metadata.num_warps * target.warp_size
    small = 0
    for shape, bits in _ACCESS.findall(binary.stages["ttir"].read_text()):
        elements = math.prod(int(length) for length in shape.split("x") if length)
        if elements * int(bits) < 8 * _SMALL_BYTES:
            small += -(-elements // lanes)
    return small


@dataclass(frozen=True)
class _Instruction:
    opcode: tuple[str, ...]  # ("LDG", "E", "128")
    operands: str
    address: int
    jump: int | None  # address
    ends: bool  # control never reaches the next instruction


# NVIDIA

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_SASS = re.compile(r"/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_JUMP = re.compile(r"(?:^|[\s,])0x([0-9a-f]+)$")


def _nvidia_facts(target: Target, binary: Binary, listing: list[_Instruction]) -> Facts:
    usage = _run("cuobjdump", "-res-usage", str(binary.stages["cubin"]))
    registers, static_shared = (int(re.search(rf"\b{key}:(\d+)", usage)[1]) for key in ("REG", "SHARED"))  # type: ignore[index]
    loads, stores, copies, matrix, count = (
        Counter[int](),
        Counter[int](),
        Counter[int](),
        Counter[str](),
        Counter[str](),
    )
    in_loop = _in_loops(listing)
    for instruction, loops in zip(listing, in_loop, strict=True):
        name, *modifiers = instruction.opcode
        bits = _sass_width(modifiers)
        match name:
            case "NOP":
                continue
            case "LDG" | "LD":
                loads[bits] += 1
            case "STG" | "ST":
                stores[bits] += 1
            case "LDGSTS":
                copies[bits] += 1
            case "UTMALDG" | "UTMASTG" | "UBLKCP":
                count["tma"] += 1
            case "STL" | "LDL":
                count[name] += bits // 8
                count["loop spills"] += bits // 8 * loops
            case "MUFU":
                count["special"] += 1
            case "BAR":
                count["barriers"] += 1
            case _ if name.endswith("MMA"):  # but not HFMA2.MMA, an ordinary multiplication
                matrix[name] += 1
        count["instructions"] += 1
    return Facts(
        kernel=binary.metadata.name,
        target=target.name,
        num_warps=_resident_warps(binary.metadata),
        registers=registers,
        spill_stores=count["STL"],
        spill_loads=count["LDL"],
        loop_spills=count["loop spills"],
        shared=binary.metadata.shared + static_shared,
        tensor_memory=getattr(binary.metadata, "tmem_size", None) or 0,
        instructions=count["instructions"],
        loads=dict(loads),
        stores=dict(stores),
        copies=dict(copies),
        tma=count["tma"],
        dots=_dots(binary),
        small=_small_accesses(target, binary),
        matrix=dict(matrix),
        special=count["special"],
        barriers=count["barriers"],
    )


def _resident_warps(metadata: Any) -> int:
    # A warp-specialised kernel runs more warps than num_warps says.
    return getattr(metadata, "total_num_warps", None) or metadata.num_warps


def _sass_width(modifiers: Iterable[str]) -> int:
    widths = {"256": 256, "128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}
    return next((widths[m] for m in modifiers if m in widths), 32)


def _text_section(cubin: bytes) -> bytes:
    """The code of the one kernel in an ELF file."""
    headers_at = struct.unpack_from("<Q", cubin, 0x28)[0]
    size, number, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, headers_at + i * size) for i in range(number)]
    names_at = headers[names_index][4]
    texts = [
        cubin[offset : offset + length]
        for name, _, _, _, offset, length in headers
        if cubin[names_at + name :].startswith(b".text.")
    ]
    assert len(texts) == 1, f"expected one .text section in the cubin, found {len(texts)}"
    return texts[0]


def _disassemble(target: Target, texts: Sequence[bytes]) -> list[list[_Instruction]]:
    """One listing per text. They are disassembled as one raw image, in which jumps are addresses."""
    if not texts:
        return []
    suffix = "a" if int(target.arch) >= 90 else ""  # Triton compiles for the architecture-specific features
    with tempfile.NamedTemporaryFile(suffix=".bin") as image:
        image.write(b"".join(texts))
        image.flush()
        sass = _run("nvdisasm", "--no-dataflow", "--binary", f"SM{target.arch}{suffix}", image.name)
    listing = [_sass_instruction(match) for match in _SASS.finditer(sass)]
    assert len(listing) * 16 == sum(map(len, texts)), "nvdisasm left out instructions"
    listings, start = [], 0
    for text in texts:
        listings.append(listing[start : start + len(text) // 16])
        start += len(text) // 16
    return listings


def _sass_instruction(match: re.Match[str]) -> _Instruction:
    address, predicate, opcode, operands = match.groups()
    name = opcode.split(".")[0]
    jump = _JUMP.search(operands) if name == "BRA" else None
    return _Instruction(
        opcode=tuple(opcode.split(".")),
        operands=operands,
        address=int(address, 16),
        jump=int(jump[1], 16) if jump else None,
        # BRA may carry its condition as an operand: `BRA P0, 0x40`, `BRA.DIV UR4, 0x40`
        ends=not predicate and (name in ("EXIT", "RET") or (name == "BRA" and operands.startswith("0x"))),
    )


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


# AMD

_AMD_LINE = re.compile(r"^(?:(\.LBB\w+):|\s+((?:v|s|ds|global|buffer|flat|scratch)_\w+)[ \t]*([^;\n]*))", re.M)
_AMD_ACCESS = re.compile(r"(global|buffer|flat|scratch)_(load|store)_(lds_)?([a-z0-9_]+)")
_AMD_SPECIAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_")
_AMD_WIDTHS = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "byte": 8, "ubyte": 8, "sbyte": 8}


def _amd_facts(target: Target, binary: Binary) -> Facts:
    assembly = binary.stages["amdgcn"].read_text()
    listing = _amd_listing(assembly)
    loads, stores, copies, matrix, count = (
        Counter[int](),
        Counter[int](),
        Counter[int](),
        Counter[str](),
        Counter[str](),
    )
    for instruction, loops in zip(listing, _in_loops(listing), strict=True):
        opcode = instruction.opcode[0]
        count["instructions"] += 1
        if access := _AMD_ACCESS.match(opcode):
            memory, kind, to_lds, width = access.groups()
            bits = _AMD_WIDTHS.get(width, 16)  # short, ushort, short_d16, short_d16_hi
            if memory == "scratch":
                count[kind] += bits // 8
                count["loop spills"] += bits // 8 * loops
            elif to_lds or re.search(r"\blds\b", instruction.operands):
                copies[bits] += 1
            else:
                (loads if kind == "load" else stores)[bits] += 1
        elif opcode.startswith(("v_mfma", "v_smfmac")):
            matrix["MFMA"] += 1
        elif _AMD_SPECIAL.match(opcode):
            count["special"] += 1
        elif opcode == "s_barrier":
            count["barriers"] += 1
    return Facts(
        kernel=binary.metadata.name,
        target=target.name,
        num_warps=binary.metadata.num_warps,
        registers=int(re.search(r"\.vgpr_count:\s+(\d+)", assembly)[1]),  # type: ignore[index]
        spill_stores=count["store"],
        spill_loads=count["load"],
        loop_spills=count["loop spills"],
        shared=binary.metadata.shared,
        tensor_memory=0,
        instructions=count["instructions"],
        loads=dict(loads),
        stores=dict(stores),
        copies=dict(copies),
        tma=0,
        dots=_dots(binary),
        small=_small_accesses(target, binary),
        matrix=dict(matrix),
        special=count["special"],
        barriers=count["barriers"],
    )


def _amd_listing(assembly: str) -> list[_Instruction]:
    lines = [match.groups() for match in _AMD_LINE.finditer(assembly)]
    labels, instructions = dict[str, int](), list[tuple[str, str]]()
    for label, opcode, operands in lines:
        if label:
            labels[label] = len(instructions)
        else:
            instructions.append((opcode, operands.strip()))
    return [
        _Instruction(
            opcode=(opcode,),
            operands=operands,
            address=address,
            jump=labels.get(operands) if opcode.startswith(("s_branch", "s_cbranch")) else None,
            ends=opcode in ("s_branch", "s_endpgm"),
        )
        for address, (opcode, operands) in enumerate(instructions)
    ]


# Loops


def _in_loops(listing: Sequence[_Instruction]) -> list[bool]:
    """For every instruction, whether control can come back to it. A jump backwards alone proves nothing: compilers
    place rarely taken paths at the end and return from there."""
    index = {instruction.address: i for i, instruction in enumerate(listing)}
    targets = {index[i.jump] for i in listing if i.jump in index}
    starts = sorted({0} | targets | {i + 1 for i, x in enumerate(listing) if x.jump is not None or x.ends})
    starts = [start for start in starts if start < len(listing)]
    block_of = {start: block for block, start in enumerate(starts)}
    spans = list(zip(starts, [*starts[1:], len(listing)], strict=True))
    successors = []  # bit masks of blocks
    for block, (_, stop) in enumerate(spans):
        last = listing[stop - 1]
        mask = 0 if last.ends or block + 1 == len(spans) else 1 << (block + 1)
        if last.jump in index and index[last.jump] != stop - 1:  # the self-jump after EXIT is padding
            mask |= 1 << block_of[index[last.jump]]
        successors.append(mask)
    cyclic = [bool(mask >> block & 1) for block, mask in enumerate(_closure(successors))]
    return [inside for inside, (start, stop) in zip(cyclic, spans, strict=True) for _ in range(start, stop)]


def _closure(successors: list[int]) -> list[int]:
    """All blocks that each block leads to (Warshall's algorithm on bit masks)."""
    reachable = list(successors)
    for middle in range(len(reachable)):
        for block, mask in enumerate(reachable):
            if mask >> middle & 1:
                reachable[block] = mask | reachable[middle]
    return reachable
