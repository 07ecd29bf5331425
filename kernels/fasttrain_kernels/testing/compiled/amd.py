"""Metadata of AMD binaries, from the assembly that Triton hands to its linker, with metadata at its end."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fasttrain_kernels.testing.compiled.listing import Binary, Instruction, InstructionCounts, in_loops
from fasttrain_kernels.testing.compiled.metadata import KernelMetadata
from fasttrain_kernels.testing.targets import Target

_LINE = re.compile(r"^(?:(\.LBB\w+):|\s+((?:v|s|ds|global|buffer|flat|scratch)_\w+)[ \t]*([^;\n]*))", re.M)
_ACCESS = re.compile(r"(global|buffer|flat|scratch)_(load|store)_(lds_)?([a-z0-9_]+)")
_SPECIAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_")
_WIDTHS = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "byte": 8, "ubyte": 8, "sbyte": 8}


def amd_metadata(target: Target, binaries: Sequence[Binary]) -> list[KernelMetadata]:
    """Return the metadata of many kernels."""
    return [_metadata(target, binary) for binary in binaries]


def _metadata(target: Target, binary: Binary) -> KernelMetadata:
    assembly = binary.stages["amdgcn"].read_text()
    listing = _listing(assembly)
    counts = InstructionCounts()
    for instruction, in_loop in zip(listing, in_loops(listing), strict=True):
        opcode = instruction.opcode[0]
        counts.instructions += 1
        if access := _ACCESS.match(opcode):
            memory, kind, to_lds, width = access.groups()
            bits = _WIDTHS.get(width, 16)  # short, ushort, short_d16, short_d16_hi
            if memory == "scratch":
                counts.spill(bits, store=kind == "store", in_loop=in_loop)
            elif to_lds or re.search(r"\blds\b", instruction.operands):
                counts.copies[bits] += 1
            else:
                (counts.loads if kind == "load" else counts.stores)[bits] += 1
        elif opcode.startswith(("v_mfma", "v_smfmac")):
            counts.matrix["MFMA"] += 1
        elif _SPECIAL.match(opcode):
            counts.special += 1
        elif opcode == "s_barrier":
            counts.barriers += 1
    return counts.metadata(target, binary, registers=int(re.search(r"\.vgpr_count:\s+(\d+)", assembly)[1]))  # type: ignore[index]


def _listing(assembly: str) -> list[Instruction]:
    lines = [match.groups() for match in _LINE.finditer(assembly)]
    labels, instructions = dict[str, int](), list[tuple[str, str]]()
    for label, opcode, operands in lines:
        if label:
            labels[label] = len(instructions)
        else:
            instructions.append((opcode, operands.strip()))
    return [
        Instruction(
            opcode=(opcode,),
            operands=operands,
            address=address,
            jump=labels.get(operands) if opcode.startswith(("s_branch", "s_cbranch")) else None,
            ends=opcode in ("s_branch", "s_endpgm"),
        )
        for address, (opcode, operands) in enumerate(instructions)
    ]
