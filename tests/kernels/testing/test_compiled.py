import contextlib
import dataclasses
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime.driver import driver

import fasttrain_kernels
from fasttrain_kernels._registration import runs_triton, shared_memory, warps
from fasttrain_kernels.swiglu import swiglu
from fasttrain_kernels.testing.compiled import record, rules
from fasttrain_kernels.testing.compiled.__main__ import main
from fasttrain_kernels.testing.compiled.cases import CASES
from fasttrain_kernels.testing.compiled.survey import Row, survey
from fasttrain_kernels.testing.targets import TARGETS, occupancy, target_named

STORED = Path(__file__).parents[3] / "bench" / "results" / "compiled.json"
CPU = torch.device("cpu")


@triton.jit
def centre_kernel(x, out, BLOCK: tl.constexpr):
    """Holds a whole row in registers: the mean needs all of it, and the subtraction again."""
    col = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * BLOCK + col)
    tl.store(out + tl.program_id(0) * BLOCK + col, row - tl.sum(row, axis=0) / BLOCK)


@triton.jit
def centre_rows_kernel(x, out, num_rows, BLOCK: tl.constexpr):
    """The same in a loop."""
    col = tl.arange(0, BLOCK)
    for i in range(num_rows):
        row = tl.load(x + i * BLOCK + col)
        tl.store(out + i * BLOCK + col, row - tl.sum(row, axis=0) / BLOCK)


@triton.jit
def copy_kernel(x, out, BLOCK: tl.constexpr):
    col = tl.arange(0, BLOCK)
    tl.store(out + col, tl.load(x + col))


@triton.jit
def matmul_kernel(a, b, out, num_blocks, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    acc = tl.zeros((M, N), tl.float32)
    for i in range(num_blocks):
        acc = tl.dot(tl.load(a + m * 4096 + i * K + k[None, :]), tl.load(b + (i * K + k[:, None]) * 4096 + n), acc)
    tl.store(out + m * 4096 + n, acc)


def floats(*shape):
    return torch.empty(shape)


# Occupancy


@pytest.mark.parametrize(
    ("target", "num_warps", "registers", "shared", "expected"),
    [
        ("sm_80", 8, 64, 0, (4, 32, "registers")),  # 8 warps of 64 registers per lane in each partition
        ("sm_80", 8, 65, 0, (3, 24, "registers")),  # rounded up to 72: 7 warps per partition, 28 in all
        ("sm_90", 4, 32, 0, (16, 64, "warps")),
        ("sm_90", 4, 50, 0, (9, 36, "registers")),
        ("sm_86", 1, 16, 0, (16, 16, "blocks")),
        ("sm_89", 1, 16, 0, (24, 24, "blocks")),
        ("sm_80", 4, 32, 48 * 1024, (3, 12, "shared")),  # 164 // (48 + 1) KiB
        ("sm_90", 8, 128, 100 * 1024, (2, 16, "registers")),
        ("sm_89", 2, 200, 16_888, (4, 8, "registers")),  # 2 warps per partition: not 65,536 // (200 * 64) = 5 blocks
        ("sm_89", 2, 168, 16_888, (5, 10, "shared")),
        ("sm_120", 4, 32, 101_376, (1, 4, "shared")),
        ("sm_120", 4, 32, 101_377, (0, 0, "launch")),
        ("gfx942", 4, 128, 0, (4, 16, "registers")),
        ("gfx942", 4, 132, 0, (3, 12, "registers")),
        ("gfx942", 4, 32, 24 * 1024, (2, 8, "shared")),
        ("gfx942", 2, 32, 0, (16, 32, "warps")),
        ("gfx942", 16, 32, 0, (2, 32, "warps")),
        ("gfx942", 32, 32, 0, (0, 0, "launch")),  # 2,048 threads
    ],
)
def test_occupancy_equals_the_vendors_arithmetic(target, num_warps, registers, shared, expected):
    found = occupancy(TARGETS[target], num_warps=num_warps, registers=registers, shared=shared)
    assert (found.blocks, found.warps, found.limiter) == expected


def test_tensor_memory_limits_occupancy():
    found = occupancy(TARGETS["sm_100"], num_warps=4, registers=64, tensor_memory=256)
    assert (found.blocks, found.limiter) == (2, "tensor memory")


def test_shared_memory_per_block_is_what_cuda_documents():
    limits = {name: target.shared_per_block for name, target in TARGETS.items()}
    assert limits == {
        "sm_80": 166_912,
        "sm_86": 101_376,
        "sm_89": 101_376,
        "sm_90": 232_448,
        "sm_100": 232_448,
        "sm_120": 101_376,
        "gfx942": 65_536,
    }


def test_amd_occupancy_equals_llvms():
    with record("gfx942") as launches:
        for block in (1024, 8192, 16384):
            centre_kernel[(8,)](floats(8, block), floats(8, block), BLOCK=block, num_warps=1)
    for launch in launches:
        assembly = launches._binaries[launch.key].stages["amdgcn"].read_text()
        assert launch.metadata.occupancy.warps == 4 * int(re.search(r"; Occupancy: (\d+)", assembly)[1])


# KernelMetadata


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120"])
def test_spilled_bytes_equal_those_of_ptxas(target, capsys):
    """The compiler's log is the truth, but it is lost when Triton's cache answers: we count instructions instead."""
    with knobs.nvidia.scope(), knobs.compilation.scope(), record(target) as launches:
        knobs.nvidia.dump_ptxas_log, knobs.compilation.always_compile = True, True
        centre_kernel[(8,)](floats(8, 8192), floats(8, 8192), BLOCK=8192, num_warps=1)
    log = capsys.readouterr().out
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log).groups()
    (metadata,) = launches.metadata
    assert (metadata.spill_stores, metadata.spill_loads) == tuple(map(int, spills))
    assert metadata.spill_stores > 0
    assert metadata.registers == int(re.search(r"Used (\d+) registers", log)[1]) == 255
    assert rules.problems(Row(target, "rms_norm", "fp32", metadata=metadata))[0].startswith(
        f"spills {metadata.spill_stores} B"
    )


@pytest.mark.parametrize(("target", "block"), [("sm_90", 8192), ("gfx942", 32768)])
def test_spills_in_a_loop_are_told_from_those_outside(target, block):
    with record(target) as launches:
        centre_kernel[(1,)](floats(block), floats(block), BLOCK=block, num_warps=1)
        centre_rows_kernel[(1,)](floats(8, block), floats(8, block), 8, BLOCK=block, num_warps=1)
    outside, inside = launches.metadata
    assert outside.spills
    assert outside.loop_spills == 0
    assert inside.loop_spills > 0.9 * (inside.spill_stores + inside.spill_loads)


@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
@pytest.mark.parametrize(
    ("dtype", "offset", "bits"),
    [(torch.float32, 0, 128), (torch.bfloat16, 0, 128), (torch.float32, 1, 32), (torch.bfloat16, 1, 16)],
)
def test_width_of_accesses_follows_the_alignment_of_the_pointer(target, dtype, offset, bits):
    x = torch.empty(8192 + offset, dtype=dtype)[offset:]
    with record(target) as launches:
        copy_kernel[(1,)](x, torch.empty(8192, dtype=dtype), BLOCK=8192)
    (metadata,) = launches.metadata
    lanes = 4 * TARGETS[target].warp_size
    if target == "gfx942" and dtype.itemsize == 4:
        bits = 128  # needs no more than the alignment of a dword
    assert metadata.loads == {bits: 8192 * dtype.itemsize * 8 // (lanes * bits)}
    assert bits == 128 or metadata.narrow_bulk


@pytest.mark.parametrize(
    ("target", "matrix"),
    [("sm_80", "HMMA"), ("sm_90", "HGMMA"), ("sm_100", "UTCHMMA"), ("sm_120", "HMMA"), ("gfx942", "MFMA")],
)
def test_matrix_instructions_shared_memory_and_its_limit(target, matrix):
    a, b = torch.empty(128, 4096, dtype=torch.bfloat16), torch.empty(4096, 4096, dtype=torch.bfloat16)
    with record(target) as launches:
        matmul_kernel[(1,)](a, b, floats(128, 4096), 64, M=128, N=256, K=64, num_warps=8, num_stages=4)
    (metadata,) = launches.metadata
    assert set(metadata.matrix) == {matrix}
    assert metadata.dots == 1
    assert metadata.fits == (metadata.shared <= TARGETS[target].shared_per_block)
    assert metadata.fits == (target in ("sm_80", "sm_90", "sm_100"))  # three tiles of (128 + 256) * 64 bf16: 144 KiB
    assert metadata.fits or "does not fit" in rules.problems(Row(target, "attention", "bf16", metadata=metadata))[0]


# Recording


def test_record_compiles_and_runs_nothing():
    out = torch.full((8192,), 7.0)
    with record("sm_90") as launches:
        copy_kernel[(3,)](floats(8192), out, BLOCK=8192)
        copy_kernel[(5,)](floats(8192), out, BLOCK=8192)
    assert (out == 7).all()
    assert [(launch.kernel, launch.grid) for launch in launches] == [
        ("copy_kernel", (3, 1, 1)),
        ("copy_kernel", (5, 1, 1)),
    ]
    assert [metadata.kernel for metadata in launches.metadata] == ["copy_kernel"]
    assert launches[0].metadata is launches[1].metadata


def test_record_restores_everything():
    before = driver._active, knobs.compilation.listener, dict(copy_kernel.device_caches)
    with contextlib.suppress(KeyboardInterrupt), record("gfx942"):
        copy_kernel[(1,)](floats(8192), floats(8192), BLOCK=8192)
        assert runs_triton(floats(1))
        assert (shared_memory(CPU), warps(256, CPU)) == (65_536, 4)
        raise KeyboardInterrupt
    assert (driver._active, knobs.compilation.listener, dict(copy_kernel.device_caches)) == before
    assert not runs_triton(floats(1))
    assert (shared_memory(CPU), warps(256, CPU)) == (101_376, 8)


def test_a_target_does_not_see_the_kernels_of_another():
    kinds = []
    for target in ("sm_80", "sm_90", "sm_80"):
        with record(target) as launches:
            copy_kernel[(1,)](floats(8192), floats(8192), BLOCK=8192)
        kinds.append(launches.metadata[0].target)
    assert kinds == ["sm_80", "sm_90", "sm_80"]


def test_unknown_target_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"target 'sm_75' is unknown; known are sm_80, .*, gfx942"):
        target_named("sm_75")


# Rules and stored figures


@pytest.fixture(scope="module")
def swiglu_row() -> Row:
    with record("sm_90") as launches:
        swiglu(torch.empty(64, 4096, dtype=torch.bfloat16), torch.empty(64, 4096, dtype=torch.bfloat16))
    return Row("sm_90", "swiglu", "bf16", "_swiglu_fwd_kernel", "", launches.metadata[0])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        ({"registers": 8}, None),
        ({"registers": 64}, "registers was"),
        ({"spill_loads": 4}, "spilled bytes was 0 and is 4"),
        ({"shared": 1024}, "shared memory was 0 and is 1024"),
        ({"num_warps": 32, "registers": 40}, "resident warps was"),
        ({"loads": {64: 4}}, "share of 128-bit accesses was 100% and is 33%"),
    ],
)
def test_regressions_are_told_from_improvements(swiglu_row, change, complaint):
    now = dataclasses.replace(swiglu_row, metadata=dataclasses.replace(swiglu_row.metadata, **change))
    found = rules.regressions(now, swiglu_row.metadata)
    assert not found if complaint is None else any(complaint in text for text in found)


def test_figures_survive_being_stored(swiglu_row, tmp_path):
    rules.write(tmp_path / "figures.json", rules.figures([swiglu_row]))
    version, figures = rules.read(tmp_path / "figures.json")
    assert version == triton.__version__
    assert rules.stored_metadata(swiglu_row, figures) == swiglu_row.metadata


def test_command_prints_a_table_and_writes_the_figures(tmp_path, capsys):
    arguments = ["--target", "sm_90", "--op", "swiglu", "--jobs", "1", "--json", str(tmp_path / "figures.json")]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "sm_90 (H100, H200)" in printed
    assert re.search(r"swiglu_bwd +bf16 F=14336", printed)
    assert "0 problems" in printed
    assert set(rules.read(tmp_path / "figures.json")[1]["sm_90"]) == {"swiglu"}


def test_command_stores_figures_and_compares_with_them(tmp_path, capsys):
    stored = tmp_path / "figures.json"
    arguments = ["--target", "sm_90", "--op", "swiglu", "--jobs", "1", "--stored", str(stored)]
    assert main([*arguments, "--update"]) == 0
    version, figures = rules.read(stored)
    for kernel in figures["sm_90"]["swiglu"].values():
        kernel["registers"] -= 2 * rules.REGISTER_MARGIN
    rules.write(stored, figures)
    assert version == triton.__version__
    assert main(arguments) == 1
    assert "registers was" in capsys.readouterr().out


def test_command_updates_no_file_but_the_given_one(capsys):
    with pytest.raises(SystemExit):
        main(["--update"])
    assert "--update needs --stored FILE" in capsys.readouterr().err


# What we ship


def kernels_in_the_library() -> set[str]:
    found = set()
    for module in pkgutil.walk_packages(fasttrain_kernels.__path__, "fasttrain_kernels."):
        if ".testing" not in module.name and not module.name.endswith("__main__"):
            members = vars(importlib.import_module(module.name)).values()
            found |= {
                m.__name__ for m in members if isinstance(m, triton.JITFunction) and m.__name__.endswith("_kernel")
            }
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_of_the_library_has_stored_figures(target):
    _, figures = rules.read(STORED)
    stored = {key.split(": ")[1].split("#")[0] for op in figures[target].values() for key in op}
    assert stored == kernels_in_the_library()


@pytest.mark.parametrize(("kernel", "case"), rules.ALLOWED_SPILLS)
def test_an_allowed_spill_is_still_one(kernel, case):
    _, figures = rules.read(STORED)
    stored = [ops[op].get(f"{case}: {kernel}", {}) for ops in figures.values() for op in ops]
    assert any("spill_stores" in metadata for metadata in stored)


@pytest.mark.parametrize("op", CASES)
@pytest.mark.parametrize("target", TARGETS)
def test_shipped_kernels_compile_without_spills_and_no_worse_than_before(target, op):
    """A covering part of the survey; `python -m fasttrain_kernels.testing.compiled` does all of it."""
    rows = survey(target, op, quick=True)
    found = [f"{row.key}: {problem}" for row in rows for problem in rules.problems(row)]
    assert not found, "\n".join(found)
    version, figures = rules.read(STORED)
    if version != triton.__version__:
        pytest.skip(f"the stored figures are for triton {version}, this is {triton.__version__}")
    update = f"python -m fasttrain_kernels.testing.compiled --stored {STORED} --op {op} --update"
    for row in rows:
        stored = rules.stored_metadata(row, figures)
        assert stored is not None, f"{row.key} has no stored figures: {update}"
        worse = rules.regressions(row, stored)
        assert not worse, f"{row.key}: {'; '.join(worse)}. If it is meant to be: {update}"
