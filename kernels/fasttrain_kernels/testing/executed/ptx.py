"""The PTX text of one kernel as parameters, registers, instructions and labels."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fasttrain_kernels.testing.executed.values import KINDS


class Unsupported(NotImplementedError):
    """An instruction, spelling or operand without a rule. It is refused, never guessed."""


@dataclass(frozen=True)
class Operand:
    """One operand as it is written."""

    # "register", "special", "immediate", "shared" (the kernel's shared memory), "param", "vector", "address", "label",
    # "sink"
    kind: str
    text: str
    value: int = 0  # bits of an immediate; offset of an address
    parts: tuple[Operand, ...] = ()  # of a vector, and of d|p
    base: Operand | None = None  # of an address
    negated: bool = False  # !p


@dataclass(frozen=True)
class PtxInstruction:
    """One instruction, with the place that it comes from."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: str | None  # the predicate behind @
    guard_negated: bool
    line: int  # of the PTX text
    source: str  # "file:line" of the kernel
    scope: tuple[int, ...] = ()  # the braces around it: labels of inline assembly are local to them

    def __str__(self) -> str:
        return f"{self.opcode} (PTX line {self.line}, {self.source})"


@dataclass
class PtxKernel:
    """A parsed kernel."""

    name: str
    target: str
    threads: int  # of a block
    params: list[tuple[str, str]] = field(default_factory=list)  # name, type
    registers: dict[str, int] = field(default_factory=dict)  # name -> bits
    code: list[PtxInstruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)  # .branchtargets: labels, by the table's own

    @property
    def param_names(self) -> set[str]:
        return {name for name, _ in self.params}

    def destination(self, branch: PtxInstruction) -> int:
        """The index that a branch jumps to: of the label in the innermost scope."""
        return self._at(branch, branch.operands[0].text)

    def jump_table(self, switch: PtxInstruction, name: str) -> list[int]:
        """The indices that a brx.idx may jump to."""
        return [self._at(switch, label) for label in self.tables[name]]

    def _at(self, branch: PtxInstruction, name: str) -> int:
        for depth in range(len(branch.scope), -1, -1):
            at = self.labels.get(_label(name, branch.scope[:depth]))
            if at is not None:
                return at
        raise Unsupported(f"{branch}: there is no label {name}")


_FLOAT = re.compile(r"0[fF]([0-9A-Fa-f]{8})$|0[dD]([0-9A-Fa-f]{16})$")
_INTEGER = re.compile(r"-?(0[xX][0-9A-Fa-f]+|\d+)U?$")
_OFFSET = re.compile(r"(.*?)\s*\+\s*(-?(?:0x)?[0-9A-Fa-f]+)$")
_SPECIAL = re.compile(r"%(n?tid|n?ctaid)\.[xyz]$|%(laneid|warpid|clusterid\.x|cluster_ctaid\.x|cluster_ctarank)$")
_STATEMENT = re.compile(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)
_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)\s*([^{]*)\{", re.S)


def parse(text: str) -> PtxKernel:
    """The one kernel in a PTX text."""
    entry, target = _ENTRY.search(text), re.search(r"\.target\s+(\w+)", text)
    threads = re.search(r"\.reqntid\s+(\d+)", entry[3]) if entry else None
    if not entry or not target or not threads:
        raise Unsupported("PTX without .target, .entry or .reqntid")
    kernel = PtxKernel(entry[1], target[1], int(threads[1]))
    for declaration in filter(None, (part.split() for part in entry[2].split(","))):
        kernel.params.append((declaration[-1].split("[")[0], declaration[1].lstrip(".")))
    body = text[entry.end() :]
    if end := re.search(r"(?m)^\s*\.section", body):
        body = body[: end.start()]
    files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', text))
    _parse_body(kernel, body, text.count("\n", 0, entry.end()) + 1, files)
    return kernel


def _label(name: str, scope: tuple[int, ...]) -> str:
    return f"{name}@{scope}"


def _parse_body(kernel: PtxKernel, text: str, first_line: int, files: dict[str, str]) -> None:
    source, pending, last_label, blocks = "?", "", "", 0
    scope: tuple[int, ...] = ()
    for number, raw in enumerate(text.split("\n"), first_line):
        line = raw.split("//")[0].strip()
        if line.startswith(".loc"):
            _, file, row, *_ = line.split()
            source = f"{files.get(file, '?').rsplit('/', 1)[-1]}:{row}"
            continue
        if line.startswith(".file"):
            continue
        pending = f"{pending} {line}".strip()
        while pending:
            if label := re.match(r"([$\w]+)\s*:(?!:)", pending):
                last_label = label[1]
                kernel.labels[_label(last_label, scope)] = len(kernel.code)
                pending = pending[label.end() :].strip()
            elif pending.startswith(".branchtargets") and ";" in pending:
                targets, pending = (part.strip() for part in pending.split(";", 1))
                kernel.tables[last_label] = _split(targets.removeprefix(".branchtargets"))
            elif pending[0] in "{}":  # a scope: vectors only occur behind an opcode
                blocks += 1
                scope = (*scope, blocks) if pending[0] == "{" else scope[:-1]
                pending = pending[1:].strip()
            elif ";" in pending:
                statement, pending = (part.strip() for part in pending.split(";", 1))
                _parse_statement(kernel, statement, number, source, scope)
            else:
                break
    if pending:
        raise Unsupported(f"PTX ends with {pending!r}")


def _parse_statement(kernel: PtxKernel, text: str, line: int, source: str, scope: tuple[int, ...]) -> None:
    if not text or text.startswith(".pragma"):
        return
    if text.startswith(".reg"):
        _declare(kernel, text)
        return
    match = _STATEMENT.match(text)
    if not match:
        raise Unsupported(f"PTX line {line}: {text}")
    negated, guard, opcode, rest = match.groups()
    operands = tuple(_operand(kernel, part) for part in _split(rest))
    kernel.code.append(PtxInstruction(opcode, operands, guard, negated == "!", line, source, scope))


def _declare(kernel: PtxKernel, text: str) -> None:
    _, kind, names = text.split(None, 2)
    bits = KINDS[kind.lstrip(".")].bits
    for name in (name.strip() for name in names.split(",")):
        if counted := re.match(r"(%?\w+)<(\d+)>$", name):
            kernel.registers |= {f"{counted[1]}{i}": bits for i in range(int(counted[2]))}
        elif kernel.registers.setdefault(name, bits) != bits:
            raise Unsupported(f"register {name} is declared with two widths")


def _split(text: str) -> list[str]:
    """Operands at commas outside of brackets."""
    found, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            found.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*found, last] if last else found


def _operand(kernel: PtxKernel, text: str) -> Operand:
    if text.startswith("{"):
        return Operand("vector", text, parts=tuple(_operand(kernel, p) for p in _split(text.strip("{} \t"))))
    if text.startswith("["):
        (inner, *rest), offset = _split(text[1:-1].strip()), 0
        if not _INTEGER.match(inner) and (plus := _OFFSET.match(inner)):
            inner, offset = plus[1].strip(), int(plus[2], 0)
        parts = tuple(_operand(kernel, part) for part in rest)  # the coordinates of a bulk copy
        return Operand("address", text, value=offset, base=_operand(kernel, inner), parts=parts)
    if text == "_":
        return Operand("sink", text)
    if text.startswith("!"):
        return Operand("register", text[1:], negated=True)
    if _SPECIAL.match(text):
        return Operand("special", text)
    if text in kernel.registers:
        return Operand("register", text)
    if match := _FLOAT.match(text):
        return Operand("immediate", text, value=int(match[1] or match[2], 16))
    if _INTEGER.match(text):
        return Operand("immediate", text, value=int(text.rstrip("U"), 0))
    if text == "global_smem":
        return Operand("shared", text)
    if text in kernel.param_names:
        return Operand("param", text)
    if "|" in text:
        return Operand("vector", text, parts=tuple(_operand(kernel, p.strip()) for p in text.split("|")))
    return Operand("label", text)
