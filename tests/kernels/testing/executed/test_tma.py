"""Bulk copies of tiles, with tensor maps that the kernel writes itself."""

import pytest
import torch

from fasttrain_kernels.testing import Fault, Unsupported
from tests.kernels.testing.executed.written import address, run

ROWS, COLUMNS = 5, 12
BOX = (4, 8)  # rows of 32 bytes
TILE = 128  # bytes
MAP, TILES, BARRIER = 0, 128, 512  # in shared memory
SHARED = 1024


def replaced(field, value, at="", bits=32):
    ordinal = f"{at}, " if at != "" else ""
    return f"@%p1 tensormap.replace.tile.{field}.shared::cta.b1024.b{bits} [%rd5 + 0], {ordinal}{value};\n"


def made(tensor="%in0", swizzle=1, fill=0, stride=4 * COLUMNS, rank=1, elemtype=7, interleave=0):
    """A map of ROWS x COLUMNS numbers of float32, written to %in1."""
    return (
        "mov.b32 %r1, global_smem; setp.eq.s32 %p1, %r0, 0; shl.b32 %r2, %r0, 2; add.s32 %r3, %r1, %r2;\n"
        "st.shared.b32 [%r3], 0; bar.warp.sync -1; cvt.u64.u32 %rd5, %r1;\n"
        + replaced("global_address", tensor, bits=64)
        + replaced("rank", rank) + replaced("elemtype", elemtype) + replaced("interleave_layout", interleave)
        + replaced("box_dim", BOX[1], 0) + replaced("box_dim", BOX[0], 1)
        + replaced("global_dim", COLUMNS, 0) + replaced("global_dim", ROWS, 1)
        + f"mov.b64 %rd6, {stride};\n" + replaced("global_stride", "%rd6", 0, bits=64)
        + replaced("element_stride", 1, 0) + replaced("element_stride", 1, 1)
        + replaced("swizzle_mode", swizzle) + replaced("fill_mode", fill) + "bar.warp.sync -1;\n"
    )  # fmt: skip


PUBLISH = (
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%in1], [%rd5], 128;\n"
)
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%in1], 128; cvta.global.u64 %rd4, %in1; bar.sync 0;\n"
MAKE = made() + PUBLISH + ACQUIRE
INIT = (
    f"@%p1 mbarrier.init.shared::cta.b64 [%r1+{BARRIER}], 1;\n"
    f"@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+{BARRIER}], {TILE}; bar.sync 0;\n"
)
WAIT = f"L: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1+{BARRIER}], 0; @!%p2 bra.uni L;\n"
# Every lane takes four bytes of the tile, as they lie in shared memory
TAKE = f"ld.shared.b32 %r9, [%r3+{TILES}];\n" + address("%in2") + "st.global.b32 [%rd0], %r9;\n"
PUT = address("%in2") + f"ld.global.b32 %r9, [%rd0]; st.shared.b32 [%r3+{TILES}], %r9;\n"
FENCE = "fence.proxy.async.shared::cta; bar.sync 0;\n"
COMMIT, DONE = "cp.async.bulk.commit_group;\n", "cp.async.bulk.wait_group.read 0;\n"


def load(column, row, tile=TILES):
    return (
        f"mov.b32 %r4, {column}; mov.b32 %r5, {row}; add.s32 %r6, %r1, {tile};\n"
        "@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r6], [%rd4, {%r4, %r5}], "
        f"[%r1+{BARRIER}];\n"
    )


def store(column, row):
    return (
        f"mov.b32 %r4, {column}; mov.b32 %r5, {row}; add.s32 %r6, %r1, {TILES};\n"
        "@%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd4, {%r4, %r5}], [%r6];\n"
    )


def execute(*parts, tile=None, **options):
    x = torch.arange(1.0, ROWS * COLUMNS + 1).view(ROWS, COLUMNS)
    tile = torch.zeros(BOX) if tile is None else tile
    launch = run("".join(parts), x, torch.zeros(128, dtype=torch.uint8), tile, shared=SHARED, **options)
    return launch, x, tile


def swizzled_32(tile):
    """The two chunks of a row are exchanged where bit 7 of the address is set, as for all of these rows."""
    return tile.view(BOX[0], 2, 4).flip(1).reshape(BOX)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("fill", [0, 1])
def test_a_tile_is_loaded_swizzled_and_filled_outside(fill, early):
    made_so = made(fill=fill) + PUBLISH + ACQUIRE
    launch, x, tile = execute(made_so, INIT, load(8, 3), WAIT, TAKE, early=early)
    expected = torch.full(BOX, torch.nan if fill else 0.0)
    expected[:2, :4] = x[3:, 8:]
    assert torch.equal(tile.nan_to_num(-1), swizzled_32(expected).nan_to_num(-1))
    assert launch.findings == []
    assert launch.classes["bulk copy"] == 1
    assert launch.bytes_read == 8 * 4


def test_without_a_swizzle_rows_follow_each_other():
    _, x, tile = execute(made(swizzle=0), PUBLISH, ACQUIRE, INIT, load(4, 1), WAIT, TAKE)
    assert torch.equal(tile, x[1:5, 4:])


def test_a_tile_is_stored_inside_of_the_tensor():
    given = torch.randn(BOX)
    launch, x, _ = execute(MAKE, PUT, FENCE, store(8, -2), COMMIT, DONE, tile=given)
    before = torch.arange(1.0, ROWS * COLUMNS + 1).view(ROWS, COLUMNS)
    before[:2, 8:] = swizzled_32(given)[2:, :4]
    assert torch.equal(x, before)
    assert launch.findings == []
    assert launch.bytes_written == 8 * 4


def test_a_tile_before_its_mbarrier_is_a_fault():
    with pytest.raises(Fault, match="asynchronous copy is still writing"):
        execute(MAKE, INIT, load(0, 0), TAKE, WAIT)


def test_waiting_for_bytes_that_nobody_copies_is_a_fault():
    with pytest.raises(Fault, match="waits forever"):
        execute(MAKE, INIT, WAIT)


def test_a_copy_that_nobody_waits_for_is_found():
    launch, *_ = execute(MAKE, INIT, load(0, 0))
    assert list(launch.unfinished) == ["ends with bulk copies that nobody waited for"]
    launch, *_ = execute(MAKE, PUT, FENCE, store(0, 0), COMMIT)
    assert list(launch.unfinished) == ["ends with asynchronous copies that nobody waited for"]


def test_a_store_needs_a_proxy_fence_and_an_unchanged_tile():
    launch, *_ = execute(MAKE, PUT, "bar.sync 0;", store(0, 0), COMMIT, DONE)
    assert [what.split(" (")[0] for what in launch.unfenced] == [
        "st.shared -> cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"
    ]
    with pytest.raises(Fault, match="its tile changed before it was waited for"):
        execute(MAKE, PUT, FENCE, store(0, 0), COMMIT, f"st.shared.b32 [%r3+{TILES}], 5;", DONE)


def test_a_tile_that_nobody_wrote_is_found():
    launch, *_ = execute(MAKE, store(0, 0), COMMIT, DONE)
    assert "reads an operand that nobody wrote" in next(iter(launch.uninitialised))


def test_a_tensor_map_needs_its_fence():
    launch, *_ = execute(made(), PUBLISH, "mov.b64 %rd4, %in1;", INIT, load(0, 0), WAIT)
    assert next(iter(launch.unfenced)).startswith("a tensor map without fence.proxy.tensormap")


def test_a_copy_into_a_tile_that_another_warp_has_just_read_is_a_race():
    first, second = INIT + load(0, 0) + WAIT, load(0, 1)
    read = f"ld.shared.b32 %r9, [%r1+{TILES}];"
    again = f"@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+{BARRIER}], {TILE};"
    end = f"M: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1+{BARRIER}], 1; @!%p2 bra.uni M;"
    quiet = (
        made().replace("st.shared.b32 [%r3], 0;", "setp.lt.u32 %p4, %r0, 32; @%p4 st.shared.b32 [%r3], 0;")
        + "@%p4 " + PUBLISH + ACQUIRE
    )  # fmt: skip
    execute(quiet, first, read, "bar.sync 0;", again, second, end, threads=64)
    with pytest.raises(Fault, match="race in shared memory"):
        execute(quiet, first, read, again, second, end, threads=64)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(stride=40), Fault, "multiples of 16 bytes"),
        (dict(swizzle=4), Unsupported, "swizzle=4"),
        (dict(interleave=1), Unsupported, "interleaved"),
        (dict(rank=5), Unsupported, "rank 6"),
        (dict(elemtype=9), Fault, "a box that no tensor map has"),
        (dict(elemtype=13), Unsupported, "elemtype=13"),
    ],
)
def test_a_map_that_nothing_copies_by_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        execute(made(**changes), PUBLISH, ACQUIRE, INIT, load(0, 0))


def test_a_tile_at_an_odd_address_is_a_fault():
    with pytest.raises(Fault, match="no multiple of 128"):
        execute(MAKE, INIT, load(0, 0, tile=TILES + 16))
