"""Build the null GPU for the CUDA build of torch of an environment (make nullgpu).

    python bench/nullgpu/build.py --site .venv-nullgpu/lib/python3.11/site-packages [--cuda /usr/local/cuda]

Every CUDA symbol that torch's libraries need, and do not find in src/, becomes a stub that returns 0 and is counted.
The libraries go to nvidia/cu13/lib of the site-packages, where torch's RPATH leads. Needs gcc, and CUDA 13's headers.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "src"
SHARED = ("settings", "errors", "counters", "memory", "streams", "capture", "card")  # libnullgpu.so, under all others
# Library: what its symbols begin with, and its source, where it has one. The first that matches has the symbol.
LIBRARIES = {
    "libcublasLt.so.13": ("cublasLt", "cublasLt.c"),
    "libcublas.so.13": ("cublas", "cublas.c"),
    "libcusparseLt.so.0": ("cusparseLt", None),
    "libcusparse.so.12": ("cusparse", None),
    "libcudnn.so.9": ("cudnn", "cudnn.c"),
    "libcufft.so.12": ("cufft", None),
    "libcurand.so.10": ("curand", None),
    "libcusolver.so.12": ("cusolver", None),
    "libcufile.so.0": ("cuFile", None),
    "libcupti.so.13": ("cupti", "cupti.c"),
    "libcudart.so.13": ("(__)?cuda", "cudart.c"),
    "libcuda.so.1": ("cu[A-Z]", "cuda.c"),
    "libnccl.so.2": ("nccl", "nccl.c"),
    "libnvrtc.so.13": ("nvrtc", "nvrtc.c"),
    "libnvidia-ml.so.1": ("nvml", "nvml.c"),
    "libnvshmem_host.so.3": ("nvshmem", None),
}
# Looked up by name while a program runs, which no symbol table shows: by torch, by Triton's driver.c and by pynvml.
DRIVER = """
    cuCtxGetCurrent cuCtxGetLimit cuCtxPopCurrent cuCtxPushCurrent cuCtxSetCurrent cuCtxSetLimit
    cuDeviceGet cuDeviceGetAttribute cuDeviceGetUuid cuDriverGetVersion cuFuncSetCacheConfig
    cuGetExportTable cuGetProcAddress cuModuleGetLoadingMode cuPointerGetAttributes cuTensorMapEncodeIm2col
    cuMemExportToShareableHandle cuMemGetAddressRange cuMemGetAllocationPropertiesFromHandle
    cuMemImportFromShareableHandle cuMemMap cuMemRetainAllocationHandle cuMemSetAccess cuMemsetD32Async
    cuMulticastAddDevice cuMulticastBindMem cuMulticastCreate cuMulticastUnbind cuStreamWriteValue32
    cuCtxFromGreenCtx cuDevResourceGenerateDesc cuDevSmResourceSplitByCount cuDeviceGetDevResource
    cuGreenCtxCreate cuGreenCtxDestroy cuGreenCtxStreamCreate
""".split()  # noqa: SIM905  (a list is a line for each)
MANAGEMENT = """
    nvmlDeviceGetCurrPcieLinkGeneration nvmlDeviceGetCurrPcieLinkWidth nvmlDeviceGetEccMode
    nvmlDeviceGetMaxPcieLinkGeneration nvmlDeviceGetMaxPcieLinkWidth nvmlDeviceGetMemoryErrorCounter
    nvmlDeviceGetNvLinkRemoteDeviceType nvmlDeviceGetNvLinkRemotePciInfo_v2 nvmlDeviceGetPciInfo_v3
    nvmlDeviceGetPersistenceMode nvmlDeviceGetTotalEccErrors
""".split()  # noqa: SIM905  (a list is a line for each)
NOT_SUPPORTED = {"cuGetExportTable": 801, "cuGetProcAddress": 801, **dict.fromkeys(MANAGEMENT, 3)}
STUB = 'int {0}(void) {{ COUNT("stub:{0}"); return {1}; }}\n'


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def link(target: Path, *command: str) -> None:
    """Beside the old library, then in its place: a process that has mapped the old one keeps it."""
    new = target.with_name(target.name + ".new")
    run(*command, "-shared", "-o", str(new))
    os.replace(new, target)


def needed(site: Path) -> dict[str, dict[str, str]]:
    """Library -> symbol -> its version ('' for none), over all of torch's libraries."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for library in sorted((site / "torch/lib").glob("*.so*")):
        for line in run("nm", "-D", "--undefined-only", str(library)).splitlines():
            name, _, version = line.split()[-1].partition("@")
            soname = next((soname for soname, (start, _) in LIBRARIES.items() if re.match(start, name)), None)
            if soname:
                found[soname].setdefault(name, version)
    found["libcuda.so.1"] |= dict.fromkeys(DRIVER, "")
    found["libnvidia-ml.so.1"] |= dict.fromkeys(MANAGEMENT, "")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--site", type=Path, required=True, help="site-packages that have torch")
    parser.add_argument("--cuda", type=Path, default=Path("/usr/local/cuda"), help="whose include/ has cuda.h")
    asked = parser.parse_args()
    if not (asked.cuda / "include/cuda.h").exists():
        sys.exit(f"there is no {asked.cuda}/include/cuda.h; give the place of CUDA 13's headers by --cuda")
    out = asked.site.resolve() / "nvidia/cu13/lib"
    out.mkdir(parents=True, exist_ok=True)
    flags = ("-O2", "-g", "-Wall", "-fPIC", f"-I{SOURCES}", f"-I{asked.cuda}/include")
    symbols = needed(asked.site)
    with tempfile.TemporaryDirectory() as work:
        shared(out, Path(work), flags)
        stubs = sum(library(soname, symbols[soname], out, Path(work), flags) for soname in LIBRARIES)
    print(f"{len(LIBRARIES)} libraries in {out}, {stubs} of their functions only counted")


def shared(out: Path, work: Path, flags: tuple[str, ...]) -> None:
    """Link what all libraries share; only names that begin with nullgpu_ are seen outside."""
    script = work / "nullgpu.map"
    script.write_text("{ global: nullgpu_*; local: *; };\n")
    sources = [str(SOURCES / f"{name}.c") for name in SHARED]
    named = ("-Wl,-soname,libnullgpu.so", f"-Wl,--version-script={script}")
    link(out / "libnullgpu.so", "gcc", *flags, *named, *sources, "-ldl", "-lpthread")


def library(soname: str, symbols: dict[str, str], out: Path, work: Path, flags: tuple[str, ...]) -> int:
    """Link one library; the number of its stubs."""
    stem, source = soname.split(".so")[0], LIBRARIES[soname][1]
    body, stubs = work / f"{stem}.o", work / f"{stem}_stubs.c"
    written = set()
    if source:
        run("gcc", *flags, "-c", "-o", str(body), str(SOURCES / source))
        written = {line.split()[-1] for line in run("nm", "--defined-only", "-g", str(body)).splitlines()}
    missing = sorted(set(symbols) - written)
    bodies = (STUB.format(name, NOT_SUPPORTED.get(name, 0)) for name in missing)
    stubs.write_text('#include "nullgpu.h"\n' + "".join(bodies))
    script = []
    if versions := sorted({version for version in symbols.values() if version}):
        (work / f"{stem}.map").write_text(f"{versions[0]} {{ global: *; }};\n")
        script = [f"-Wl,--version-script={work / f'{stem}.map'}"]
    parts = (*([str(body)] if source else []), str(stubs), f"-L{out}", "-lnullgpu", "-Wl,-rpath,$ORIGIN", "-ldl")
    link(out / soname, "gcc", *flags, f"-Wl,-soname,{soname}", *script, *parts)
    alias = out / f"{stem}.so"
    alias.unlink(missing_ok=True)
    alias.symlink_to(soname)
    return len(missing)


if __name__ == "__main__":
    main()
