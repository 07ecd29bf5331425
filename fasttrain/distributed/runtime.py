"""Where a run runs: device, precision, ranks, and the mesh that lays them out.

torchrun tells each process its rank through the environment. A process that was started alone is a world of one, with
a process group of its own, so that nothing after this file asks how it was started.

On a CPU, the C library's allocator is told to keep what is freed: a training step allocates the same blocks as the step
before it, and glibc would give blocks beyond 32 MB back to the system. The next step then takes a page fault for every
4 KB of them, 10,000 to 50,000 in a step of a small model.
"""

import ctypes
import hashlib
import os
import resource
import shutil
import signal
import sysconfig
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fasttrain import config
from fasttrain.distributed.hang_detector import HangDetector, reserve

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_NEVER = 2**31 - 1  # bytes, the greatest argument of mallopt
_FILES = 64  # that a run may have open: datasets, sockets of the ranks, logs
_HEAP = 2**30  # blocks up to this size come from the heap, which keeps them


def keep_freed_memory() -> bool:
    """Freed blocks stay with the process, for the next step; False where the C library is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS; Windows
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _HEAP) and mallopt(_M_TRIM_THRESHOLD, _NEVER))


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """What the modules after this one need to know of the machine."""

    device: torch.device
    precision: str  # fp32, bf16 or fp16
    rank: int
    world_size: int
    mesh: DeviceMesh  # (dp_shard,), or (dp_replicate, dp_shard) for HSDP
    checkpoint_group: dist.ProcessGroup  # gloo, for what is said about files, beside the collectives of a step
    monitor_group: dist.ProcessGroup  # gloo, for what ranks tell each other about their speed
    hang_detector: HangDetector

    @property
    def dp_rank(self) -> int:
        """Which share of a step's batch is this rank's."""
        return self.rank

    @property
    def dp_size(self) -> int:
        """How many ranks share a step's batch: as yet, all."""
        return self.world_size

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """The ranks that share a step's batch."""
        return dist.group.WORLD  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        """Of matmuls and activations."""
        return DTYPES[self.precision]

    @property
    def is_main(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0


@contextmanager
def start(parallel: config.ParallelConfig, *, device_option: str = "parallel.device") -> Iterator[Runtime]:
    """Join the ranks of the run; leave them at the end. device_option: what the user has asked with, for errors."""
    environment = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    rank, world_size, local = (int(os.environ.get(name, default)) for name, default in environment)
    _check_open_files()
    device = choose_device(parallel.device, local, option=device_option)
    if problem := parallel.indivisible(world_size):
        raise ValueError(problem)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_num_threads(1)  # CPU tensors are batches: threads would take milliseconds to wake for microseconds
    else:
        keep_freed_memory()
    # What is left of parallel.timeout is for finding out who is lost, so that all have ended when it is over.
    timeout = timedelta(seconds=parallel.timeout - reserve(parallel.timeout))
    if "RANK" in os.environ:
        _end_with_parent()
        store: dist.Store = _store_of_this_start(rank, world_size, timedelta(seconds=parallel.timeout))
        backend = "nccl" if device.type == "cuda" else "gloo"
    else:
        store = dist.HashStore()
        backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    bound = device if backend == "nccl" and world_size > 1 else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=bound)
    answers = dist.PrefixStore("hang detector", store)
    try:
        with HangDetector(answers, rank, world_size, parallel.timeout) as hang_detector:
            yield Runtime(
                device=device,
                precision=resolve_precision(parallel.precision, device),
                rank=rank,
                world_size=world_size,
                mesh=_mesh(device, world_size, parallel.dp_replicate or 1),
                checkpoint_group=dist.new_group(backend="gloo", timeout=timeout),
                monitor_group=dist.new_group(backend="gloo", timeout=timeout),
                hang_detector=hang_detector,
            )
    finally:
        dist.destroy_process_group()


def _check_open_files() -> None:
    """gloo, say, fails at its limit with a text of its own, and a loader only when the run is under way."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < _FILES:
        raise ValueError(f"{limit} open files are allowed, and a run needs {_FILES}; raise the limit: ulimit -n 1024")


def choose_device(asked: str, local: int = 0, *, option: str = "parallel.device") -> torch.device:
    """What a process runs on: the one place that decides. local: its number among those of its machine."""
    available = torch.cuda.is_available()
    if asked == "mps":
        if not torch.backends.mps.is_available():
            raise ValueError(f"{option} is mps, but torch {torch.__version__} sees no such device; set it to auto")
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError(f"{option} is mps, which one process uses alone; start it without torchrun")
        return torch.device("mps")
    if asked == "cuda" and not available:
        remedy = "set it to cpu or auto, or install a CUDA build of torch and the driver"
        raise ValueError(f"{option} is cuda, but torch {torch.__version__} sees no GPU; {remedy}")
    if asked == "cpu" or not available:
        return torch.device("cpu")
    if local >= (count := torch.cuda.device_count()):
        remedy = f"start torchrun with --nproc_per_node={count}, or set parallel.device to cpu"
        raise ValueError(f"this is process {local} of its machine, which has {count} GPUs; {remedy}")
    return torch.device("cuda", local)


def resolve_precision(asked: str, device: torch.device) -> str:
    """What parallel.precision means on a device."""
    if device.type == "mps" and asked not in ("auto", "fp32"):
        raise ValueError(f"parallel.precision is {asked}, and on mps nothing but fp32 is possible; set it to auto")
    if asked != "auto":
        return asked
    if device.type != "cuda":  # bf16 matmuls of CPUs without units for them take about 50 times as long
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def _mesh(device: torch.device, world_size: int, dp_replicate: int) -> DeviceMesh:
    axes = {"dp_replicate": dp_replicate} if dp_replicate > 1 else {}
    axes["dp_shard"] = world_size // dp_replicate
    kind = "cuda" if device.type == "cuda" else "cpu"  # mps has no collectives, and one rank needs none
    return init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))


def _store_of_this_start(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Where ranks find each other's addresses, with a prefix that no earlier start of the run has used.

    torchrun keeps its store when it starts ranks again, and a rank then finds the address of one that is dead (pytorch
    issues 135712 and 167288; its count of restarts differs between nodes and cannot be the prefix). So rank 0 invents a
    name, and every other rank takes it only once a living rank 0 has echoed what that rank has just invented itself.
    """
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    own = uuid.uuid4().hex
    if rank == 0:
        store.set(_NAME, own)
        for other in range(1, world_size):
            store.set(f"{own}/echo/{other}", store.get(f"{own}/{other}"))
        return dist.PrefixStore(own, store)
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        name = store.get(_NAME).decode()  # of an earlier start, perhaps: then nobody answers
        store.set(f"{name}/{rank}", own)
        echo = f"{name}/echo/{rank}"
        if store.check([echo]) and store.get(echo).decode() == own:
            return dist.PrefixStore(name, store)
        time.sleep(0.02)
    raise TimeoutError(f"rank {rank} heard nothing of rank 0 within {timeout.total_seconds():g} s (parallel.timeout)")


_NAME = "fasttrain/start"


def seed_step(seed: int, step: int, dp_rank: int) -> None:
    """Set the random state of a rank's step: that of its dropout."""
    digest = hashlib.sha256(f"{seed} {step} {dp_rank}".encode()).digest()
    number = int.from_bytes(digest[:7])
    # Not torch.manual_seed, which on a machine without a GPU takes a millisecond to note a seed for each that may come.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def to_host(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy on the host, and the event after which it is there."""
    if values.device.type != "cuda":
        return values.cpu(), None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return host, ready


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """SIGTERM, Ctrl-C and SIGUSR1 (Slurm) are noted: the run saves after the step. The second one ends it at once."""
    received: list[int] = []

    def note(number: int, _: object) -> None:
        received.append(number)
        # Python's own handler of Ctrl-C would unwind, and wait for a save that may be what hangs.
        signal.signal(number, signal.SIG_DFL)

    previous = {noted: signal.signal(noted, note) for noted in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        yield received
    finally:
        for noted, handler in previous.items():
            signal.signal(noted, handler)


def _end_with_parent() -> None:
    """Linux: a rank whose torchrun was killed ends too, instead of holding its GPU for the next run to find."""
    PR_SET_PDEATHSIG = 1
    with suppress(AttributeError, OSError):  # another system
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def cpp_compiler() -> str:
    """Its name or path; empty: there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return shutil.which(get_cpp_compiler()) or ""
    except InvalidCxxCompiler:
        return ""


def missing_compiler() -> str:
    """What torch.compile lacks on this machine; empty: nothing."""
    if not cpp_compiler():
        return "there is no C++ compiler (g++)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "there are no Python headers (python3-dev)"
    return ""
