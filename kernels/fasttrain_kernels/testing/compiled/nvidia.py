"""Metadata of NVIDIA binaries: registers from cuobjdump, instructions from nvdisasm; both come with Triton.

Spills are the widths of the local-memory instructions, which is the figure that ptxas prints. It needs no compiler log,
so that a kernel from Triton's cache is as good as a fresh one.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import triton

from fasttrain_kernels.testing.compiled.listing import Binary, Instruction, InstructionCounts, in_loops
from fasttrain_kernels.testing.compiled.metadata import KernelMetadata
from fasttrain_kernels.testing.targets import Target

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_SASS = re.compile(r"/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_JUMP = re.compile(r"(?:^|[\s,])0x([0-9a-f]+)$")


def nvidia_metadata(target: Target, binaries: Sequence[Binary]) -> list[KernelMetadata]:
    """Return the metadata of many kernels at once: starting the disassembler takes longer than its work on a kernel."""
    listings = _disassemble(target, [_text_section(b.stages["cubin"].read_bytes()) for b in binaries])
    return [_metadata(target, b, listing) for b, listing in zip(binaries, listings, strict=True)]


def _metadata(target: Target, binary: Binary, listing: list[Instruction]) -> KernelMetadata:
    counts = InstructionCounts()
    for instruction, in_loop in zip(listing, in_loops(listing), strict=True):
        name, *modifiers = instruction.opcode
        bits = _sass_width(modifiers)
        match name:
            case "NOP":
                continue
            case "LDG" | "LD":
                counts.loads[bits] += 1
            case "STG" | "ST":
                counts.stores[bits] += 1
            case "LDGSTS":
                counts.copies[bits] += 1
            case "UTMALDG" | "UTMASTG" | "UBLKCP":
                counts.tma += 1
            case "STL" | "LDL":
                counts.spill(bits, store=name == "STL", in_loop=in_loop)
            case "MUFU":
                counts.special += 1
            case "BAR":
                counts.barriers += 1
            case _ if name.endswith("MMA"):  # but not HFMA2.MMA, an ordinary multiplication
                counts.matrix[name] += 1
        counts.instructions += 1
    usage = _run("cuobjdump", "-res-usage", str(binary.stages["cubin"]))
    return counts.metadata(target, binary, registers=int(re.search(r"\bREG:(\d+)", usage)[1]))  # type: ignore[index]


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


def _disassemble(target: Target, texts: Sequence[bytes]) -> list[list[Instruction]]:
    """One listing per text. They are disassembled as one raw image, in which jumps are addresses."""
    if not texts:
        return []
    suffix = "a" if int(target.arch) >= 90 else ""  # Triton compiles for the architecture-specific features
    with tempfile.NamedTemporaryFile(suffix=".bin") as image:
        image.write(b"".join(texts))
        image.flush()
        sass = _run("nvdisasm", "--no-dataflow", "--binary", f"SM{target.arch}{suffix}", image.name)
    listing = [_sass_instruction(match) for match in _SASS.finditer(sass)]
    assert len(listing) * 16 == sum(map(len, texts)), "nvdisasm skipped instructions"
    listings, start = [], 0
    for text in texts:
        listings.append(listing[start : start + len(text) // 16])
        start += len(text) // 16
    return listings


def _sass_instruction(match: re.Match[str]) -> Instruction:
    address, predicate, opcode, operands = match.groups()
    name = opcode.split(".")[0]
    jump = _JUMP.search(operands) if name == "BRA" else None
    return Instruction(
        opcode=tuple(opcode.split(".")),
        operands=operands,
        address=int(address, 16),
        jump=int(jump[1], 16) if jump else None,
        # BRA may carry its condition as an operand: `BRA P0, 0x40`, `BRA.DIV UR4, 0x40`
        ends=not predicate and (name in ("EXIT", "RET") or (name == "BRA" and operands.startswith("0x"))),
    )


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout
