import pytest
import torch

from fasttrain_kernels.testing import Fault, Unsupported
from tests.kernels.testing.executed.written import address, run

OUT = address("%in0")


def shuffled(mode, by, clamp, mask="-1"):
    out = torch.zeros(64, dtype=torch.int32)
    body = f"shfl.sync.{mode}.b32 %r1|%p0, %r0, {by}, {clamp}, {mask}; selp.b32 %r2, 1, 0, %p0;"
    run(body + address("%in0", size=8) + "st.global.v2.b32 [%rd0], {%r1, %r2};", out)
    return out.view(32, 2).T.tolist()


@pytest.mark.parametrize(
    ("mode", "by", "clamp", "source"),
    [
        ("bfly", 16, 31, lambda i: i ^ 16),
        ("bfly", 1, 31, lambda i: i ^ 1),
        ("idx", 5, 31, lambda i: 5),
        ("idx", 1, 0x1C1F, lambda i: i // 4 * 4 + 1),  # segments of 4: mask 0x1C
        ("up", 3, 0, lambda i: i - 3 if i >= 3 else None),
        ("down", 3, 31, lambda i: i + 3 if i < 29 else None),
    ],
)
def test_shuffles(mode, by, clamp, source):
    values, inside = shuffled(mode, by, clamp)
    for i, (value, valid) in enumerate(zip(values, inside, strict=True)):
        expected = source(i)
        assert (value, valid) == ((i, 0) if expected is None else (expected, 1))


def test_a_shuffle_of_some_lanes_is_refused_and_of_a_part_of_a_warp_a_fault():
    with pytest.raises(Unsupported, match="some lanes only"):
        shuffled("bfly", 1, 31, "0xFFFF")
    with pytest.raises(Fault, match="not all lanes of a warp"):
        run("setp.lt.u32 %p0, %r0, 7; @%p0 shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;")


@pytest.mark.parametrize(
    ("opcode", "value", "expected"),
    [
        ("redux.sync.add.u32", "%r0", 496),
        ("redux.sync.max.s32", "%r0", 31),
        ("redux.sync.min.s32", "%r0", 0),
        ("redux.sync.or.b32", "%r0", 31),
        ("redux.sync.and.b32", "%r0", 0),
        ("redux.sync.xor.b32", "%r0", 0),
        ("redux.sync.max.f32", "%r0", 31),  # small integers are ordered as floats, too
    ],
)
def test_reductions_over_a_warp(opcode, value, expected):
    out = torch.zeros(32, dtype=torch.int32)
    run(f"{opcode} %r1, {value}, -1;" + OUT + "st.global.b32 [%rd0], %r1;", out)
    assert out.tolist() == [expected] * 32


def test_votes_and_election():
    out = torch.zeros(32, dtype=torch.int32)
    body = (
        "setp.lt.u32 %p0, %r0, 4; vote.sync.ballot.b32 %r1, %p0, -1; vote.sync.any.pred %p1, %p0, -1;"
        "vote.sync.all.pred %p2, %p0, -1; elect.sync %r2|%p3, -1; selp.b32 %r3, 256, 0, %p1;"
        "selp.b32 %r4, 512, 0, %p2; selp.b32 %r5, 1024, 0, %p3; add.s32 %r1, %r1, %r3; add.s32 %r1, %r1, %r4;"
        "add.s32 %r1, %r1, %r5;"
    )
    run(body + OUT + "st.global.b32 [%rd0], %r1;", out)
    assert out.tolist() == [15 + 256 + 1024] + [15 + 256] * 31


SHARED = "mov.b32 %r1, global_smem; shl.b32 %r2, %r0, 4; add.s32 %r2, %r1, %r2;"  # 16 bytes for each lane


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_are_loaded_and_stored(transposed):
    trans = ".trans" if transposed else ""
    x = torch.arange(256, dtype=torch.int16).view(4, 8, 8)
    registers, back = torch.zeros(32, 4, dtype=torch.int32), torch.zeros(256, dtype=torch.int16)
    lane_16 = address("%in0", size=16) + address("%in1", "%rd1", size=16) + address("%in2", "%rd2", size=16)
    body = (
        SHARED + lane_16 + "ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd0];"
        "st.shared.v4.b32 [%r2], {%r4, %r5, %r6, %r7}; bar.warp.sync -1;"
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r8, %r9, %r10, %r11}}, [%r2];"
        "st.global.v4.b32 [%rd1], {%r8, %r9, %r10, %r11};"
        f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r2+512], {{%r8, %r9, %r10, %r11}};"
        "ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r2+512]; st.global.v4.b32 [%rd2], {%r4, %r5, %r6, %r7};"
    )
    run(body, x, registers, back, shared=1024)
    matrices = x.transpose(1, 2) if transposed else x
    for lane in range(32):  # lane i holds elements 2 (i % 4) and the next of row i / 4
        pairs = registers[lane].view(torch.int16).view(4, 2)
        assert torch.equal(pairs, matrices[:, lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2])
    assert torch.equal(back, x.view(-1))


def fragment(kind, k):
    """Position of element i of lane's A and B, by the PTX manual's formulas for each shape."""
    if kind in ("bf16", "f16"):
        a = lambda g, t, i: (g + 8 * (i // 2 % 2), 2 * t + i % 2 + 8 * (i // 4))  # noqa: E731
        b = lambda g, t, i: (2 * t + i % 2 + 8 * (i // 2), g)  # noqa: E731
        return a, b, k // 2, k // 4
    if kind == "tf32":
        a = lambda g, t, i: (g + 8 * (i % 2), t + 4 * (i // 2))  # noqa: E731
        b = lambda g, t, i: (t + 4 * i, g)  # noqa: E731
        return a, b, k // 2, k // 4
    a = lambda g, t, i: (g + 8 * (i // 4 % 2), 4 * t + i % 4 + 16 * (i // 8))  # noqa: E731
    b = lambda g, t, i: (4 * t + i % 4 + 16 * (i // 4), g)  # noqa: E731
    return a, b, k // 2, k // 4


TYPES = {
    "bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32, "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2, "s8": torch.int8, "u8": torch.uint8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "k"),
    [
        ("bf16", 16),
        ("f16", 16),
        ("bf16", 8),
        ("tf32", 8),
        ("tf32", 4),
        ("e4m3", 32),
        ("e5m2", 32),
        ("s8", 32),
        ("s8", 16),
        ("s8.satfinite", 32),
        ("u8", 32),
    ],
)
def test_a_matmul_of_a_warp(kind, k):
    kind, saturates = kind.split(".")[0], "satfinite." * ("." in kind)
    low, integers = 0 if kind == "u8" else -3, kind in ("s8", "u8")
    A, B = (torch.randint(low, 4, shape).to(TYPES[kind]) for shape in ((16, k), (k, 8)))
    C = torch.randint(-9, 10, (16, 8)).to(torch.int32 if integers else torch.float32)
    if saturates:
        C += 2**31 - 10
    at_a, at_b, of_a, of_b = fragment(kind, k)
    a, b = torch.zeros(32, of_a, dtype=A.dtype), torch.zeros(32, of_b, dtype=A.dtype)
    c = torch.zeros(32, 4, dtype=C.dtype)
    at_c = lambda g, t, i: (g + 8 * (i // 2), 2 * t + i % 2)  # noqa: E731
    for lane in range(32):
        for matrix, lanes, at in ((A, a, at_a), (B, b, at_b), (C, c, at_c)):
            for i in range(lanes.shape[1]):
                lanes[lane, i] = matrix[at(lane // 4, lane % 4, i)]
    words_a, words_b = a[0].numel() * a.element_size() // 4, b[0].numel() * b.element_size() // 4
    registers_a = ", ".join(f"%r{10 + i}" for i in range(words_a))
    registers_b = ", ".join(f"%r{20 + i}" for i in range(words_b))
    body = "".join(address(f"%in{n}", f"%rd{n}", size=4 * size) for n, size in enumerate((words_a, words_b, 4)))
    for n, words in ((0, words_a), (1, words_b)):
        body += "".join(f"ld.global.b32 %r{10 + 10 * n + i}, [%rd{n}+{4 * i}];" for i in range(words))
    d = "s32" if integers else "f32"
    body += (
        "ld.global.v4.b32 {%r30, %r31, %r32, %r33}, [%rd2];"
        f"mma.sync.aligned.m16n8k{k}.row.col.{saturates}{d}.{kind}.{kind}.{d} "
        f"{{%r30, %r31, %r32, %r33}}, {{{registers_a}}}, "
        f"{{{registers_b}}}, {{%r30, %r31, %r32, %r33}};st.global.v4.b32 [%rd2], {{%r30, %r31, %r32, %r33}};"
    )
    launch = run(body, a, b, c)
    expected = (C.double() + A.double() @ B.double()).clamp(max=2**31 - 1).to(C.dtype)
    got = torch.zeros_like(C)
    for lane in range(32):
        for i in range(4):
            got[at_c(lane // 4, lane % 4, i)] = c[lane, i]
    assert torch.equal(got, expected)
    assert launch.mma_flops == 2 * 16 * 8 * k
