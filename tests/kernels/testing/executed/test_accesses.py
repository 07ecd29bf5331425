import pytest
import torch

from fasttrain_kernels.testing import Fault, Unsupported
from tests.kernels.testing.executed.written import address, run

IN, OUT = address("%in0"), address("%in1", "%rd1")


def numbers(n=32, dtype=torch.int32):
    return torch.arange(n, dtype=dtype)


def test_moves_pack_and_unpack_vectors():
    out = torch.zeros(64, dtype=torch.int32)
    body = "mov.b64 %rd2, {%r0, 7}; mov.b64 {%r1, %r2}, %rd2; mov.b32 {%rs0, %rs1}, %r0; mov.b32 %r3, {%rs1, %rs0};"
    run(body + address("%in0", size=8) + "st.global.v2.b32 [%rd0], {%r3, %r2};", out)
    assert out.view(32, 2).tolist() == [[i << 16, 7] for i in range(32)]


@pytest.mark.parametrize("hint", ["", ".L1::evict_last", ".nc", ".relaxed.gpu"])
def test_vectors_of_global_memory(hint):
    x, out = numbers(128), torch.zeros(128, dtype=torch.int32)
    order = {".nc": "ld.global.nc", ".relaxed.gpu": "ld.relaxed.gpu.global"}.get(hint, f"ld.global{hint}")
    load = f"{order}.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd0];"
    body = address("%in0", size=16) + address("%in1", "%rd1", size=16)
    launch = run(body + load + "st.global.v4.b32 [%rd1], {%r4, %r3, %r2, %r1};", x, out)
    assert torch.equal(out.view(32, 4), x.view(32, 4).flip(1))
    assert (launch.bytes_read, launch.bytes_written) == (512, 512)


def test_narrow_loads_extend_the_sign():
    x = torch.tensor([-1, 5], dtype=torch.int16).repeat(16)
    out = torch.zeros(32, dtype=torch.int32)
    run(address("%in0", size=2) + OUT + "ld.global.s16 %r1, [%rd0]; st.global.b32 [%rd1], %r1;", x, out)
    assert torch.equal(out, x.int())


def test_guards_select_lanes_and_negate():
    out = torch.full((32,), -1, dtype=torch.int32)
    body = "setp.lt.u32 %p0, %r0, 10;" + IN + "@%p0 st.global.b32 [%rd0], 1; @!%p0 st.global.b32 [%rd0], 2;"
    run(body, out)
    assert out.tolist() == [1] * 10 + [2] * 22


@pytest.mark.parametrize("wait", ["cp.async.commit_group; cp.async.wait_group 0;", "cp.async.wait_all;"])
def test_asynchronous_copies_arrive_when_they_are_waited_for_and_fill_with_zeros(wait):
    x, out = numbers(128) + 1, torch.zeros(128, dtype=torch.int32)
    body = (
        "mov.b32 %r1, global_smem; shl.b32 %r2, %r0, 4; add.s32 %r1, %r1, %r2;" + address("%in0", size=16)
        + address("%in1", "%rd1", size=16) + "setp.lt.u32 %p0, %r0, 31; selp.b32 %r3, 16, 0, %p0;"
        f"cp.async.cg.shared.global [%r1], [%rd0], 16, %r3; {wait}"
        "ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r1]; st.global.v4.b32 [%rd1], {%r4, %r5, %r6, %r7};"
    )  # fmt: skip
    launch = run(body, x, out, shared=512)
    assert torch.equal(out[:124], x[:124])
    assert out[124:].tolist() == [0] * 4
    assert launch.findings == []
    assert launch.bytes_read == 31 * 16


def test_groups_complete_in_order():
    body = (
        "mov.b32 %r1, global_smem; shl.b32 %r2, %r0, 2; add.s32 %r1, %r1, %r2;" + IN
        + "cp.async.ca.shared.global [%r1], [%rd0], 4; cp.async.commit_group;"
        "cp.async.ca.shared.global [%r1+128], [%rd0], 4; cp.async.commit_group;"
        "cp.async.wait_group 1; ld.shared.b32 %r3, [%r1]; ld.shared.b32 %r4, [%r1+{}];"
    )  # fmt: skip
    assert run(body.replace("{}", "0"), numbers(), shared=256).unfinished
    with pytest.raises(Fault, match="reads shared memory that an asynchronous copy is still writing"):
        run(body.replace("{}", "128"), numbers(), shared=256)


def test_a_partial_copy_is_refused():
    body = "mov.b32 %r1, global_smem;" + IN + "cp.async.ca.shared.global [%r1], [%rd0], 4, 2;"
    with pytest.raises(Unsupported, match="copies some of its bytes"):
        run(body, numbers(), shared=128)


ATOMICS = [
    ("add.u32", "1", 32), ("min.s32", "%r0", 0), ("max.s32", "%r0", 31), ("or.b32", "%r0", 31), ("exch.b32", "%r0", 31),
    ("xor.b32", "%r0", 0), ("and.b32", "0", 0),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "value", "expected"), ATOMICS)
def test_atomics_update_one_element_by_all_lanes(operation, value, expected):
    x = torch.zeros(1, dtype=torch.int32)
    launch = run(
        f"atom.global.gpu.relaxed.{operation.split('.')[0]}.{operation.split('.')[1]} %r1, [%in0], {value};", x
    )
    assert x.item() == expected
    assert launch.bytes_atomic == 128


@pytest.mark.parametrize(("operation", "value", "expected"), ATOMICS)
def test_atomics_of_shared_memory(operation, value, expected):
    x = torch.zeros(1, dtype=torch.int32)
    body = (
        "mov.b32 %r1, global_smem; st.shared.b32 [%r1], 0; bar.sync 0;"
        f"atom.shared.{operation} %r2, [%r1], {value}; ld.shared.b32 %r3, [%r1]; st.global.b32 [%in0], %r3;"
    )
    launch = run(body, x, shared=16)
    assert x.item() == expected
    assert launch.findings == []
    assert launch.bytes_atomic == 0
    assert run(body.replace("st.shared.b32 [%r1], 0;", ""), x, shared=16).uninitialised


@pytest.mark.parametrize("spelling", ["red.relaxed.gpu.global.add.f32", "red.global.gpu.relaxed.add.f32"])
def test_reductions_of_floats(spelling):
    x = torch.zeros(2)
    run(f"{spelling} [%in0+4], 0f3F800000;", x, threads=64, blocks=3)
    assert x.tolist() == [0.0, 192.0]


def test_packed_reductions():
    x = torch.zeros(2, dtype=torch.bfloat16)
    run("mov.b32 %r1, 0x40003F80; red.global.gpu.relaxed.add.noftz.bf16x2 [%in0], %r1;", x)  # (1, 2)
    assert x.tolist() == [32.0, 64.0]


def test_compare_and_swap_returns_what_was_there():
    x, out = torch.zeros(1, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    run("atom.acq_rel.gpu.global.cas.b32 %r1, [%in0], 0, 5;" + OUT + "st.global.b32 [%rd1], %r1;", x, out)
    assert x.item() == 5
    assert out.tolist() == [0] + [5] * 31
