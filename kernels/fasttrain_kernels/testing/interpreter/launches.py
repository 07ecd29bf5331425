"""Counts of launches: bytes per argument, FLOPs, special functions; and the errors that end a launch."""

from __future__ import annotations

from dataclasses import dataclass, field


class KernelError(RuntimeError):
    """A kernel failed in the interpreter; the text names kernel and program."""


class OutOfBounds(KernelError):
    """A lane that is not masked touched an address outside the argument that its pointer comes from."""


class WriteRace(KernelError):
    """Two programs of a launch stored to the same element."""


@dataclass
class Traffic:
    """Bytes that moved between one argument and the kernel. Lanes that are masked do not count."""

    loaded: int = 0
    stored: int = 0
    atomic: int = 0
    unique: int = 0  # distinct bytes read plus distinct bytes written: what a perfect cache would still move

    @property
    def moved(self) -> int:
        return self.loaded + self.stored + self.atomic


@dataclass
class Launch:
    """One execution of a kernel over its grid."""

    kernel: str
    grid: tuple[int, int, int]
    arguments: dict[str, Traffic] = field(default_factory=dict)  # of the tensors, by parameter name
    flops: int = 0  # of tl.dot: two per multiply and add
    elementwise: int = 0  # other additions, multiplications, divisions, maxima of floats; masked lanes count
    special: int = 0  # exp, log, sqrt, rsqrt, sin, cos, tanh, erf, ...: what the special-function units compute

    @property
    def loaded(self) -> int:
        return sum(traffic.loaded for traffic in self.arguments.values())

    @property
    def stored(self) -> int:
        return sum(traffic.stored for traffic in self.arguments.values())

    @property
    def atomic(self) -> int:
        return sum(traffic.atomic for traffic in self.arguments.values())

    @property
    def unique(self) -> int:
        return sum(traffic.unique for traffic in self.arguments.values())

    @property
    def moved(self) -> int:
        return self.loaded + self.stored + self.atomic

    def __str__(self) -> str:
        lines = [
            f"{self.kernel} {self.grid}: moved {self.moved:,} B, unique {self.unique:,} B, "
            f"{self.flops:,} dot FLOP, {self.elementwise:,} elementwise, {self.special:,} special"
        ]
        for name, traffic in self.arguments.items():
            lines.append(
                f"  {name}: loaded {traffic.loaded:,}, stored {traffic.stored:,}, atomic {traffic.atomic:,}, "
                f"unique {traffic.unique:,}"
            )
        return "\n".join(lines)


class Launches(list[Launch]):
    """The launches of a `with interpret()`, in order, with their sums."""

    @property
    def loaded(self) -> int:
        return sum(launch.loaded for launch in self)

    @property
    def stored(self) -> int:
        return sum(launch.stored for launch in self)

    @property
    def atomic(self) -> int:
        return sum(launch.atomic for launch in self)

    @property
    def moved(self) -> int:
        return sum(launch.moved for launch in self)

    @property
    def unique(self) -> int:
        return sum(launch.unique for launch in self)

    @property
    def flops(self) -> int:
        return sum(launch.flops for launch in self)

    @property
    def elementwise(self) -> int:
        return sum(launch.elementwise for launch in self)

    @property
    def special(self) -> int:
        return sum(launch.special for launch in self)

    def __str__(self) -> str:
        return "\n".join(map(str, self))
