"""Disks and networks of a test's own, in Linux namespaces: nothing outside sees them, and they end with the test.

`unshare --map-root-user` needs no privileges where the system allows user namespaces; where it does not, tests that
need one are skipped, with the reason.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest


class Shell:
    """A shell in namespaces of its own, which exist as long as it, or a process started in them."""

    def __init__(self, *namespaces: str, within: Shell | None = None) -> None:
        if not (shutil.which("unshare") and shutil.which("nsenter")):
            pytest.skip("needs unshare and nsenter (util-linux)")
        user = ["--map-root-user"] if within is None else []
        before = within.enter("--user", "--net") if within else []
        self._process = subprocess.Popen(
            [*before, "unshare", *user, *namespaces, "sh"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if self.run("echo $$").strip() != str(self._process.pid):
            self.close()
            pytest.skip(f"namespaces ({' '.join(namespaces)}) are not allowed here")

    @property
    def pid(self) -> int:
        return self._process.pid

    def enter(self, *namespaces: str) -> list[str]:
        """The beginning of a command that runs in them."""
        return ["nsenter", "--target", str(self.pid), *namespaces, "--preserve-credentials", "--"]

    def run(self, command: str) -> str:
        """Its output; an error of it is in there, after a line that says which."""
        assert self._process.stdin
        assert self._process.stdout
        lines = []
        try:
            self._process.stdin.write(f"{{ {command}; }} 2>&1 || echo failed: $?\necho :end\n")
            self._process.stdin.flush()
            while (line := self._process.stdout.readline()) not in ("", ":end\n"):
                lines.append(line)
        except BrokenPipeError:
            lines.append("failed: no shell")
        return "".join(lines)

    def must(self, command: str) -> None:
        """Skip where it is not allowed."""
        if "failed: " in (said := self.run(command)):
            pytest.skip(f"`{command}` is not allowed here ({said.splitlines()[0]})")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)


@contextmanager
def small_disk(place: Path, megabytes: int) -> Iterator[tuple[Path, Shell]]:
    """A file system of that size, as its own shell sees it at `place`; the path, by which every process sees it."""
    with ExitStack() as stack:
        shell = Shell("--mount")
        stack.callback(shell.close)
        place.mkdir()
        shell.must(f"mount -t tmpfs -o size={megabytes}m none '{place}'")
        yield Path(f"/proc/{shell.pid}/root{place}"), shell


ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "ft"


@contextmanager
def two_nodes() -> Iterator[tuple[Shell, Shell]]:
    """Two networks with one link between them, and none to anywhere else."""
    if not shutil.which("ip"):
        pytest.skip("needs ip (iproute2)")
    with ExitStack() as stack:
        first = Shell("--net")
        stack.callback(first.close)
        second = Shell("--net", within=first)
        stack.callback(second.close)
        first.must(f"ip link add {INTERFACE}0 type veth peer name {INTERFACE}1 netns {second.pid}")
        for number, node in enumerate((first, second)):
            node.must("ip link set lo up")
            node.must(f"ip address add {ADDRESSES[number]}/24 dev {INTERFACE}{number}")
            node.must(f"ip link set {INTERFACE}{number} up")
        yield first, second
