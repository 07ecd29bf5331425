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
# soname: (source, flag, prefixes of the symbols that belong to it)
LIBRARIES = {
    "libcudart.so.13": ("cudart.c", "", ("cuda", "__cuda")),
    "libcuda.so.1": ("cuda.c", "", ("cu[A-Z]",)),
    "libnccl.so.2": ("nccl.c", "", ("nccl",)),
    "libcublasLt.so.13": ("small.c", "cublasLt", ("cublasLt",)),
    "libcublas.so.13": ("small.c", "cublas", ("cublas",)),
    "libcudnn.so.9": ("small.c", "cudnn", ("cudnn",)),
    "libcupti.so.13": ("small.c", "cupti", ("cupti",)),
    "libnvrtc.so.13": ("small.c", "nvrtc", ("nvrtc",)),
    "libnvidia-ml.so.1": ("small.c", "nvml", ("nvml",)),
    "libcufft.so.12": ("small.c", "cufft", ("cufft",)),
    "libcurand.so.10": ("small.c", "curand", ("curand",)),
    "libcusparse.so.12": ("small.c", "cusparse", ("cusparse(?!Lt)",)),
    "libcusparseLt.so.0": ("small.c", "cusparseLt", ("cusparseLt",)),
    "libcusolver.so.12": ("small.c", "cusolver", ("cusolver",)),
    "libcufile.so.0": ("small.c", "cufile", ("cuFile",)),
    "libnvshmem_host.so.3": ("small.c", "nvshmem", ("nvshmem",)),
}
ORDER = [  # the first that matches has the symbol
    "libcublasLt.so.13", "libcusparseLt.so.0", "libcublas.so.13", "libcudnn.so.9", "libcufft.so.12", "libcurand.so.10",
    "libcusparse.so.12", "libcusolver.so.12", "libcufile.so.0", "libcupti.so.13", "libcudart.so.13", "libcuda.so.1",
    "libnccl.so.2", "libnvrtc.so.13", "libnvidia-ml.so.1", "libnvshmem_host.so.3",
]  # fmt: skip
# Asked for by dlsym, which no symbol table shows: by torch (see `strings`), Triton's driver.c and pynvml.
DRIVER = [
    "cuCtxGetCurrent",
    "cuCtxGetLimit",
    "cuCtxSetCurrent",
    "cuCtxSetLimit",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDriverGetVersion",
    "cuFuncSetCacheConfig",
    "cuPointerGetAttributes",
    "cuTensorMapEncodeIm2col",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemRetainAllocationHandle",
    "cuMemGetAllocationPropertiesFromHandle",
    "cuMulticastAddDevice",
    "cuMulticastBindMem",
    "cuMulticastCreate",
    "cuMulticastUnbind",
    "cuStreamWriteValue32",
    "cuMemsetD32Async",
    "cuCtxFromGreenCtx",
    "cuDevResourceGenerateDesc",
    "cuDevSmResourceSplitByCount",
    "cuDeviceGetDevResource",
    "cuGreenCtxCreate",
    "cuGreenCtxDestroy",
    "cuGreenCtxStreamCreate",
    "cuCtxPopCurrent",
    "cuCtxPushCurrent",
    "cuMemGetAddressRange",
    "cuModuleGetLoadingMode",
    "cuDeviceGetUuid",
    "cuGetProcAddress",
    "cuGetExportTable",
]
NVML = [
    "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetNvLinkRemotePciInfo_v2",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetMemoryErrorCounter",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetEccMode",
    "nvmlDeviceGetCurrPcieLinkGeneration",
    "nvmlDeviceGetCurrPcieLinkWidth",
    "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetPersistenceMode",
]
NOT_SUPPORTED = {"cuGetExportTable": 801, "cuGetProcAddress": 801, **dict.fromkeys(NVML, 3)}


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
            for soname in ORDER:
                if any(re.match(prefix, name) for prefix in LIBRARIES[soname][2]):
                    found[soname].setdefault(name, version)
                    break
    found["libcuda.so.1"] |= dict.fromkeys(DRIVER, "")
    found["libnvidia-ml.so.1"] |= dict.fromkeys(NVML, "")
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
    flags = ("-O2", "-g", "-Wall", "-fPIC", "-fvisibility=default", f"-I{SOURCES}", f"-I{asked.cuda}/include")
    link(out / "libnullgpu.so", "gcc", *flags, "-Wl,-soname,libnullgpu.so", str(SOURCES / "core.c"), "-ldl")
    symbols = needed(asked.site)
    with tempfile.TemporaryDirectory() as work:
        stubs = sum(library(soname, symbols[soname], out, Path(work), flags) for soname in LIBRARIES)
    print(f"{len(LIBRARIES)} libraries in {out}, {stubs} of their functions only counted")


def library(soname: str, symbols: dict[str, str], out: Path, work: Path, flags: tuple[str, ...]) -> int:
    """Link one library; the number of its stubs."""
    source, flag, _ = LIBRARIES[soname]
    stem = soname.split(".so")[0]
    body, stubs = work / f"{stem}.o", work / f"{stem}_stubs.c"
    run("gcc", *flags, *([f"-DLIB_{flag}"] if flag else []), "-c", "-o", str(body), str(SOURCES / source))
    written = {line.split()[-1] for line in run("nm", "--defined-only", "-g", str(body)).splitlines()}
    missing = sorted(set(symbols) - written)
    stub = 'int {0}() {{ static int seen; ng_stub("{0}", &seen); return {1}; }}\n'
    bodies = (stub.format(name, NOT_SUPPORTED.get(name, 0)) for name in missing)
    stubs.write_text('#include "core.h"\n' + "".join(bodies))
    script = []
    if versions := sorted({version for version in symbols.values() if version}):
        (work / f"{stem}.map").write_text(f"{versions[0]} {{ global: *; }};\n")
        script = [f"-Wl,--version-script={work / f'{stem}.map'}"]
    place = ("-Wl,-soname," + soname, *script, str(body), str(stubs), f"-L{out}", "-lnullgpu")
    link(out / soname, "gcc", *flags, *place, "-Wl,-rpath,$ORIGIN", "-ldl")
    alias = out / f"{stem}.so"
    alias.unlink(missing_ok=True)
    alias.symlink_to(soname)
    return len(missing)


if __name__ == "__main__":
    main()
