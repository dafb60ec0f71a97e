"""The PTX machine itself, on programs written by hand: instruction by instruction, and each fault that it must find."""

from contextlib import nullcontext
from fractions import Fraction

import numpy as np
import pytest
import torch

from kda_tools.lab.ptx import floats, machine
from kda_tools.lab.ptx.machine import execute
from kda_tools.lab.ptx.parse import PtxError, parse
from kda_tools.lab.ptx.run import DEFAULT, ENDED, Ahead, Options, pack_params

SEED = np.random.default_rng(7)
U32, F32 = np.uint32, np.float32


def source(body, words_in=0, words_out=1, threads=32):
    """A kernel whose thread i finds words_in numbers of a row i of its input in %r1, %r2, ..., and leaves %r11, ..."""
    loads = "\n".join(f"ld.global.b32 %r{1 + i}, [%d2+{4 * i}];" for i in range(words_in))
    stores = "\n".join(f"st.global.b32 [%d3+{4 * i}], %r{11 + i};" for i in range(words_out))
    return f"""
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry snippet(
    .param .u64 .ptr .global .align 1 snippet_param_0,
    .param .u64 snippet_param_1
)
.reqntid {threads}
{{
    .reg .pred %p<9>;
    .reg .b16 %h<9>;
    .reg .b32 %r<40>;
    .reg .b64 %d<9>;
    .loc 1 1 1 // a comment
    ld.param.b64 %d0, [snippet_param_0];
    ld.param.b64 %d1, [snippet_param_1];
    mov.u32 %r20, %tid.x;
    mov.u32 %r21, %ctaid.x;
    mad.lo.s32 %r0, %r21, {threads}, %r20;
    mul.wide.u32 %d2, %r0, {4 * words_in};
    add.s64 %d2, %d1, %d2;
    mul.wide.u32 %d3, %r0, {4 * words_out};
    add.s64 %d3, %d0, %d3;
    {loads}
    {body}
    {stores}
    ret;
}}
"""


def run(body, *columns, words_out=1, threads=32, blocks=1, cluster=1, shared=0, ahead=ENDED, options=DEFAULT):
    """What the threads leave in %r11, ..., as unsigned columns, given columns of 32 bits for %r1, ..."""
    rows = threads * blocks
    given = np.stack([np.asarray(column).view(U32) for column in columns], axis=1) if columns else np.zeros((1, 1), U32)
    table = torch.from_numpy(given.view(np.int32).copy())
    out = torch.full((rows, words_out), -1, dtype=torch.int32)
    made = parse(source(body, len(columns), words_out, threads))
    params = pack_params(made, [tensor.data_ptr().to_bytes(8, "little") for tensor in (out, table)])
    execute(made, (blocks, 1, 1), [out, table], params, cluster, shared, ahead, options)
    result = out.numpy().view(U32)
    return result[:, 0] if words_out == 1 else result.T


def random_bits(count):
    """float32 of every kind: infinities, NaN and subnormal numbers among them."""
    bits = SEED.integers(0, 2**32, count, dtype=U32)
    bits[:8] = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x007FFFFF, 0x7F7FFFFF]
    return bits


def nearby(count):
    """float32 whose sums and products meet: exponents from -3 to 3."""
    return (SEED.standard_normal(count) * np.exp2(SEED.integers(-3, 4, count))).astype(F32)


def nearest(value):
    """The float32 nearest to a fraction, of two the even one."""
    around = F32(float(value))
    candidates = [around, np.nextafter(around, F32(-np.inf)), np.nextafter(around, F32(np.inf))]
    return min(candidates, key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(U32)) & 1))


# --- arithmetic


def test_fma_rounds_once():
    # Squares of 1 + 2^-12 lie halfway between two float32; what is added decides.
    tie, tiny = F32(1 + 2**-12), F32(2.0**-80)
    a, b, c = (
        np.concatenate([first, nearby(508)]).astype(F32) for first in ([tie] * 4, [tie] * 4, [0, tiny, -tiny, 1])
    )
    c[4:260] *= F32(2.0**-24)
    got = run("fma.rn.f32 %r11, %r1, %r2, %r3;", a, b, c, blocks=16).view(F32)
    rows = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    assert got.tolist() == [float(nearest(Fraction(x) * Fraction(y) + Fraction(z))) for x, y, z in rows]
    assert got[1] > got[0] == got[2]


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_fma_of_16_bits_rounds_once(kind, dtype):
    # (1 + e)(1 + e) is 1 + 2e + e^2: of the two units of 1 + 2e, what is added decides whether it becomes one or two.
    eps = torch.finfo(dtype).eps
    a, b, c = (torch.from_numpy(nearby(1024)).to(dtype) for _ in range(3))
    a[:2], b[:2], c[:2] = 1 + eps, 1 + eps, torch.tensor([eps / 2, eps / 2 - eps**2], dtype=dtype)
    c[2:512] *= eps
    words = [x.view(torch.int16).numpy().view(U32) for x in (a, b, c)]
    got = run(f"fma.rn.{kind}x2 %r11, %r1, %r2, %r3;", *words, blocks=16)
    exact = [
        Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    values = torch.from_numpy(got.view(np.int16)).view(dtype)
    around = torch.stack([torch.nextafter(values, values - sign) for sign in (1, -1)]).double()
    for value, near, want in zip(values.tolist(), around.T.tolist(), exact, strict=True):
        assert abs(Fraction(value) - want) <= min(abs(Fraction(x) - want) for x in near)
    assert values[0] != values[1]
    twice = (a.double() * b.double()).to(dtype).double() + c.double()
    assert not torch.equal(values, twice.to(dtype))


@pytest.mark.parametrize(
    ("instruction", "exact"),
    [
        ("add.f32 %r11, %r1, %r2;", lambda x, y: x + y),
        ("sub.rn.f32 %r11, %r1, %r2;", lambda x, y: x - y),
        ("mul.f32 %r11, %r1, %r2;", lambda x, y: x * y),
        ("div.rn.f32 %r11, %r1, %r2;", lambda x, y: x / y),
        ("max.f32 %r11, %r1, %r2;", max),
        ("neg.f32 %r11, %r1;", lambda x, _: -x),
        ("abs.f32 %r11, %r1;", lambda x, _: abs(x)),
    ],
)
def test_float32(instruction, exact):
    a, b = nearby(256), nearby(256)
    got = run(instruction, a, b, blocks=8).view(F32)
    rows = zip(a.tolist(), b.tolist(), strict=True)
    assert got.tolist() == [float(nearest(exact(Fraction(x), Fraction(y)))) for x, y in rows]


@pytest.mark.parametrize(
    ("instruction", "exact"),
    [
        ("ex2.approx.ftz.f32 %r11, %r1;", np.exp2),
        ("lg2.approx.f32 %r11, %r1;", np.log2),
        ("rcp.approx.ftz.f32 %r11, %r1;", lambda x: 1 / x),
        ("rsqrt.approx.f32 %r11, %r1;", lambda x: x**-0.5),
        ("sqrt.approx.f32 %r11, %r1;", np.sqrt),
        ("tanh.approx.f32 %r11, %r1;", np.tanh),
        ("div.full.f32 %r11, %r1, %r1;", lambda x: x / x),
    ],
)
def test_approximate_instructions_are_exact_or_as_far_off_as_they_may_be(instruction, exact):
    x = np.abs(nearby(64)) + F32(0.01)
    right = exact(x.astype(np.float64))
    bound = floats.BOUNDS.get(instruction.split(".")[0], floats.DEFAULT_BOUND)
    for error in (-1, 0, 1):
        got = run(instruction, x, blocks=2, options=Options(error=error)).view(F32)
        np.testing.assert_allclose(got, right * (1 + error * bound), rtol=2.0**-24, atol=0)


def test_ftz_flushes_and_nothing_else_does():
    subnormal = np.full(32, -1e-40, F32)
    assert run("mul.f32 %r11, %r1, 0f3F800000;", subnormal).view(F32)[0] == F32(-1e-40)
    flushed = run("mul.ftz.f32 %r11, %r1, 0f3F800000;", subnormal).view(F32)
    assert flushed[0] == 0
    assert np.signbit(flushed[0])


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_narrow_floats_round_to_nearest_even(kind, dtype):
    bits = random_bits(4096)
    bits[64:1088] = (bits[64:1088] & U32(0xFFFF0000)) | U32(0x8000)  # ties of bfloat16
    bits[1088:2112] = (bits[1088:2112] & U32(0xBFFFE000)) | U32(0x38001000)  # ties of float16
    value = torch.from_numpy(bits.view(F32).copy())
    both = run(f"cvt.rn.{kind}x2.f32 %r11, %r1, %r2;", bits, bits[::-1].copy(), blocks=128)
    one = run(f"cvt.rn.{kind}.f32 %h1, %r1; cvt.f32.{kind} %r11, %h1;", bits, blocks=128).view(F32)
    for got, given in ((both >> 16, value), (both & 0xFFFF, value.flip(0))):
        got = torch.from_numpy(got.astype(np.uint16).view(np.int16)).view(dtype)
        assert torch.equal(got.isnan(), given.isnan())
        assert torch.equal(got.nan_to_num(), given.to(dtype).nan_to_num())
    np.testing.assert_array_equal(one, value.to(dtype).float().numpy())
    np.testing.assert_array_equal(floats.to_bf16(np.array([1 + 2**-8, 1 + 3 * 2**-8], F32)), [0x3F80, 0x3F82])


def test_float8_rounds_to_nearest_even_and_saturates():
    bits = random_bits(4096)
    # Ties of float8_e4m3fn: a sign, three digits, a half of the last one, and all exponents that it has.
    bits[:2048] = (bits[:2048] & U32(0x80700000)) | U32(0x00080000) | (U32(117) + np.arange(2048, dtype=U32) % 19 << 23)
    value = torch.from_numpy(bits.view(F32).copy())
    both = run("cvt.rn.satfinite.e4m3x2.f32 %h1, %r1, %r2; cvt.u32.u16 %r11, %h1;", bits, bits[::-1].copy(), blocks=128)
    for got, given in ((both >> 8, value), (both & 0xFF, value.flip(0))):
        got = torch.from_numpy(got.astype(np.uint8)).view(torch.float8_e4m3fn).float()
        want = given.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        assert torch.equal(got.isnan(), given.isnan())
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
    assert len(torch.unique(want.nan_to_num())) > 150, "most of its numbers"


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "max"])
def test_arithmetic_of_narrow_pairs(kind, dtype, name):
    a, b = (torch.from_numpy(nearby(512)).to(dtype) for _ in "ab")
    words = [x.view(torch.int32).numpy() for x in (a, b)]
    got = torch.from_numpy(run(f"{name}.{kind}x2 %r11, %r1, %r2;", *words, blocks=8).view(np.int32)).view(dtype)
    torch_name = {"max": "maximum"}.get(name, name)
    assert torch.equal(got, getattr(torch, torch_name)(a, b))


def signed(x):
    return x - 2**32 if x >= 2**31 else x


def divide(x, y):
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def permute(a, b, selectors):
    both = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")]
    picks = [(selectors >> (4 * i)) & 15 for i in range(4)]
    return int.from_bytes([both[p % 8] if p < 8 else 255 * (both[p % 8] > 127) for p in picks], "little")


def extract(x, at, length):
    return sum(((x >> min(at + i, 31)) & 1) << i for i in range(length)) - (
        ((x >> min(at + length - 1, 31)) & 1) << length if length else 0
    )


@pytest.mark.parametrize(
    ("instruction", "exact"),
    [
        ("add.s32 %r11, %r1, %r2;", lambda a, b: a + b),
        ("sub.s32 %r11, %r1, 5;", lambda a, _: a - 5),
        ("mul.lo.s32 %r11, %r1, %r2;", lambda a, b: a * b),
        ("mul.hi.u32 %r11, %r1, %r2;", lambda a, b: a * b >> 32),
        ("mul.hi.s32 %r11, %r1, %r2;", lambda a, b: signed(a) * signed(b) >> 32),
        ("cvt.u16.u32 %h1, %r1; mul.hi.u16 %h2, %h1, -21845; cvt.u32.u16 %r11, %h2;",
         lambda a, _: (a & 0xFFFF) * 0xAAAB >> 16),
        ("cvt.u16.u32 %h1, %r1; mul.hi.s16 %h2, %h1, 999; cvt.s32.s16 %r11, %h2;",
         lambda a, _: ((a & 0x7FFF) - (a & 0x8000)) * 999 >> 16),
        ("mad.lo.s32 %r11, %r1, %r2, %r2;", lambda a, b: a * b + b),
        ("mul.wide.s32 %d4, %r1, %r2; shr.u64 %d4, %d4, 32; cvt.u32.u64 %r11, %d4;",
         lambda a, b: signed(a) * signed(b) >> 32),
        ("mad.wide.u32 %d4, %r1, %r2, 7; cvt.u32.u64 %r11, %d4;", lambda a, b: a * b + 7),
        ("div.s32 %r11, %r1, %r2;", lambda a, b: divide(signed(a), signed(b))),
        ("div.u32 %r11, %r1, %r2;", lambda a, b: a // b),
        ("rem.s32 %r11, %r1, %r2;", lambda a, b: signed(a) - divide(signed(a), signed(b)) * signed(b)),
        ("min.s32 %r11, %r1, %r2;", lambda a, b: min(signed(a), signed(b))),
        ("max.u32 %r11, %r1, %r2;", max),
        ("min.relu.s32 %r11, %r1, %r2;", lambda a, b: max(min(signed(a), signed(b)), 0)),
        ("max.relu.s32 %r11, %r1, %r2;", lambda a, b: max(signed(a), signed(b), 0)),
        ("neg.s32 %r11, %r1;", lambda a, _: -a),
        ("and.b32 %r11, %r1, %r2;", lambda a, b: a & b),
        ("or.b32 %r11, %r1, %r2;", lambda a, b: a | b),
        ("xor.b32 %r11, %r1, %r2;", lambda a, b: a ^ b),
        ("not.b32 %r11, %r1;", lambda a, _: ~a),
        ("and.b32 %r12, %r2, 63; shl.b32 %r11, %r1, %r12;", lambda a, b: a << (b & 63)),
        ("and.b32 %r12, %r2, 63; shr.u32 %r11, %r1, %r12;", lambda a, b: a >> (b & 63)),
        ("and.b32 %r12, %r2, 63; shr.s32 %r11, %r1, %r12;", lambda a, b: signed(a) >> (b & 63)),
        ("bfe.u32 %r11, %r1, 7, 11;", lambda a, _: a >> 7 & 2047),
        ("bfe.s32 %r11, %r1, 27, 1;", lambda a, _: extract(a, 27, 1)),
        ("bfe.s32 %r11, %r1, 25, 13;", lambda a, _: extract(a, 25, 13)),
        ("prmt.b32 %r11, %r1, %r2, %r2;", lambda a, b: permute(a, b, b)),
        ("prmt.b32 %r11, %r1, %r2, 0x7632U;", lambda a, b: (a >> 16) | (b & 0xFFFF0000)),
        ("setp.lt.s32 %p1, %r1, %r2; selp.b32 %r11, %r1, %r2, %p1;", lambda a, b: min(signed(a), signed(b))),
        ("mov.b32 {%h1, %h2}, %r1; mov.b32 %r11, {%h2, %h1};", lambda a, _: (a << 16) | (a >> 16)),
        ("mov.b64 %d4, {%r1, %r2}; mov.b64 {_, %r11}, %d4;", lambda _, b: b),
        ("cvt.s64.s32 %d4, %r1; shr.s64 %d4, %d4, 40; cvt.u32.u64 %r11, %d4;", lambda a, _: signed(a) >> 40),
        ("cvt.u16.u32 %h1, %r1; cvt.s32.s16 %r11, %h1;", lambda a, _: (a & 0x7FFF) - (a & 0x8000)),
    ],
)  # fmt: skip
def test_integers(instruction, exact):
    a, b = random_bits(256), random_bits(256)[::-1].copy() | U32(1)
    b[1::2] %= U32(1000)
    got = run(instruction, a, b, blocks=8)
    assert got.tolist() == [exact(x, y) % 2**32 for x, y in zip(a.tolist(), b.tolist(), strict=True)]


@pytest.mark.parametrize("ordered", ["lt", "le", "gt", "ge", "eq", "ne", "ltu", "neu"])
def test_comparisons_with_nan(ordered):
    a, b = random_bits(256).view(F32), random_bits(256).view(F32)
    b[:128] = a[:128]
    got = run(f"setp.{ordered}.f32 %p1, %r1, %r2; selp.b32 %r11, 1, 0, %p1;", a, b, blocks=8).astype(bool)
    compare = {"lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b, "eq": a == b, "ne": a != b}[ordered[:2]]
    nan = np.isnan(a) | np.isnan(b)
    np.testing.assert_array_equal(got, compare | nan if ordered.endswith("u") else compare & ~nan)


# --- control


def test_threads_part_and_meet_again():
    # Thread i adds i, i times, behind a loop that each leaves at its own time; the shuffle needs them all again.
    body = """
    mov.u32 %r11, 0;
    mov.u32 %r5, %r20;
    $L_head: setp.eq.b32 %p1, %r5, 0;
    @%p1 bra $L_done;
    { .reg .b32 %r5x; mov.u32 %r5x, %r20; add.s32 %r11, %r11, %r5x; }
    sub.s32 %r5, %r5, 1;
    bra.uni $L_head;
    $L_done: setp.lt.u32 %p2, %r20, 16;
    @!%p2 add.s32 %r11, %r11, 1000;
    shfl.sync.bfly.b32 %r11, %r11, 31, 31, -1;
    """
    got = run(body, threads=64)
    lane = np.arange(64) ^ 31
    np.testing.assert_array_equal(got, lane**2 + 1000 * (lane >= 16))


def test_names_in_braces_are_their_own():
    block = "{ .reg .pred P1; setp.eq.b32 P1, %r20, 3; @P1 bra DONE; add.s32 %r11, %r11, 1; DONE: }"
    got = run(f"mov.u32 %r11, 0; {block} {block}")
    assert got.tolist() == [0 if i == 3 else 2 for i in range(32)]


def test_grids_larger_than_what_runs_at_a_time(monkeypatch):
    monkeypatch.setattr(machine, "TOGETHER", 128)
    assert run("mov.u32 %r11, %r0;", blocks=9).tolist() == list(range(288))


def test_errors_count_blocks_from_the_first_of_the_grid(monkeypatch):
    monkeypatch.setattr(machine, "TOGETHER", 64)
    with pytest.raises(PtxError, match="block 5, thread 0: global address 0x0"):
        run("mov.b64 %d4, 0; setp.eq.b32 %p1, %r21, 5; @%p1 ld.global.b32 %r11, [%d4]; mov.u32 %r11, 0;", blocks=7)


def test_an_endless_program(monkeypatch):
    monkeypatch.setattr(machine, "STEPS", 1000)
    with pytest.raises(PtxError, match="more than 1000 instructions"):
        run("$L_again: mov.u32 %r11, 0; bra $L_again;")


# --- warps


@pytest.mark.parametrize(
    ("mode", "by", "clamp", "source"),
    [
        ("bfly", 5, 31, lambda i: i ^ 5),
        ("up", 3, 0, lambda i: i - 3 if i >= 3 else i),
        ("down", 4, 31, lambda i: i + 4 if i < 28 else i),
        ("idx", 9, 31, lambda _: 9),
        ("down", 1, 0x1807, lambda i: i + 1 if i % 8 < 7 else i),
        ("idx", 2, 0x1C03, lambda i: i // 4 * 4 + 2),
    ],
)
def test_shuffles(mode, by, clamp, source):
    value = random_bits(64)
    got, inside = run(
        f"shfl.sync.{mode}.b32 %r11|%p1, %r1, {by}, {clamp}, -1; selp.b32 %r12, 1, 0, %p1;",
        value, threads=64, words_out=2,
    )  # fmt: skip
    lanes = np.array([source(i) for i in range(32)])
    np.testing.assert_array_equal(got, value[np.concatenate([lanes, lanes + 32])])
    moved = np.array([source(i) != i for i in range(32)]) | (mode == "idx")
    np.testing.assert_array_equal(inside, np.tile(moved, 2))


def test_a_shuffle_of_some_lanes():
    body = """
    mov.u32 %r11, %r20;
    setp.ge.u32 %p1, %r20, 8;
    @%p1 bra $L_end;
    shfl.sync.bfly.b32 %r11, %r20, 1, 31, 255;
    $L_end:
    """
    assert run(body).tolist() == [i ^ 1 if i < 8 else i for i in range(32)]


@pytest.mark.parametrize("transposed", ["", ".trans"])
def test_matrices_of_a_warp(transposed):
    # Matrix i has rows of 8 numbers of 16 bits: 64 i + 8 row + column.
    value = np.arange(32)[:, None] * 8 + np.arange(8)
    words = [np.ascontiguousarray(value.astype(np.uint16)).view(U32)[:, j].copy() for j in range(4)]
    body = f"""
    mov.u32 %r5, smem; shl.b32 %r6, %r20, 4; add.s32 %r5, %r5, %r6;
    st.shared.v4.b32 [%r5], {{%r1, %r2, %r3, %r4}};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {{%r11, %r12, %r13, %r14}}, [%r5];
    bar.warp.sync -1;
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r5], {{%r11, %r12, %r13, %r14}};
    bar.warp.sync -1;
    ld.shared.v4.b32 {{%r15, %r16, %r17, %r18}}, [%r5];
    """
    got = run(body, *words, words_out=8, shared=512).T
    matrices = value.reshape(4, 8, 8).transpose(0, 2, 1) if transposed else value.reshape(4, 8, 8)
    pairs = matrices.reshape(4, 32, 2)
    np.testing.assert_array_equal(got[:, :4], (pairs[..., 0] + (pairs[..., 1] << 16)).T)
    np.testing.assert_array_equal(np.ascontiguousarray(got[:, 4:]).view(np.uint16), matrices.reshape(32, 8))


@pytest.mark.parametrize(("name", "reduce"), [("min", np.min), ("max", np.max), ("add", np.sum)])
def test_reductions_of_a_warp(name, reduce):
    value = np.arange(-7, 57, dtype=np.int32) * 3
    got = run(f"redux.sync.{name}.s32 %r11, %r1, -1;", value, threads=64).view(np.int32)
    np.testing.assert_array_equal(got, np.repeat([reduce(value[:32]), reduce(value[32:])], 32))


# --- blocks and clusters


@pytest.mark.parametrize("order", ["relaxed", "acquire", "release", "acq_rel"])
def test_atomic_operations_are_one_after_the_other(order):
    add = f"atom.global.gpu.{order}.add.u32 %r11, [%d1], 2;"
    assert run(add, np.zeros(64, U32), threads=64).tolist() == list(range(0, 128, 2))
    exchange = "atom.global.exch.b32 %r11, [%d1], %r20;"
    assert run(exchange, np.full(32, 9, U32)).tolist() == [9, *range(31)]


COUNT = """
    mov.u32 %r5, smem;
    setp.eq.u32 %p1, %r20, 0;
    @%p1 st.shared.b32 [%r5], 5;
    {before}
    atom.shared.cta.add.u32 %r11, [%r5], 1;
    {behind}
    ld.shared.b32 %r12, [%r5];
"""


def test_atomic_operations_in_shared_memory():
    body = COUNT.format(before="bar.sync 0;", behind="bar.sync 0;")
    got = run(body, np.zeros(64, U32), words_out=2, threads=64, shared=4)
    assert got[0].tolist() == list(range(5, 69))
    assert got[1].tolist() == [69] * 64
    with pytest.raises(PtxError, match=r"atom.* a race: thread 1 of the run changes what thread 0 of the run wrote"):
        run(COUNT.format(before="", behind="bar.sync 0;"), np.zeros(64, U32), words_out=2, threads=64, shared=4)
    with pytest.raises(PtxError, match=r"ld.* a race: thread 0 of the run reads what thread one or more of the run"):
        run(COUNT.format(before="bar.sync 0;", behind=""), np.zeros(64, U32), words_out=2, threads=64, shared=4)


WAITING = """
    mov.u32 %r11, 7;
    setp.ne.u32 %p1, %r21, 0;
    @%p1 bra $L_tell;
    $L_wait: ld.volatile.global.b32 %r11, [%d1];
    setp.eq.u32 %p2, %r11, 0;
    @%p2 bra $L_wait;
    bra $L_end;
    $L_tell: atom.global.gpu.relaxed.exch.b32 %r12, [%d1], 7;
    $L_end:
"""


@pytest.mark.parametrize("seed", range(3))
def test_blocks_in_turns_do_not_keep_others_from_theirs(seed):
    given = np.zeros(64, U32)
    assert run(WAITING, given, blocks=2, options=Options(turns=seed)).tolist() == [7] * 64


def test_a_block_that_waits_alone_waits_for_ever(monkeypatch):
    monkeypatch.setattr(machine, "STEPS", 1000)
    with pytest.raises(PtxError, match="more than 1000 instructions"):
        run(WAITING, np.zeros(64, U32), blocks=2, options=Options(apart=True))


REVERSE = """
    mov.u32 %r5, smem; shl.b32 %r6, %r20, 2; add.s32 %r5, %r5, %r6;
    st.shared.b32 [%r5], %r1;
    {barrier}
    sub.s32 %r6, 63, %r20; shl.b32 %r6, %r6, 2; mov.u32 %r7, smem; add.s32 %r7, %r7, %r6;
    ld.shared.b32 %r11, [%r7];
"""


@pytest.mark.parametrize("barrier", ["bar.sync 0;", "barrier.sync 3, 64;"])
def test_a_barrier(barrier):
    value = random_bits(128)
    got = run(REVERSE.format(barrier=barrier), value, threads=64, blocks=2, shared=256)
    np.testing.assert_array_equal(got, value.reshape(2, 64)[:, ::-1].reshape(-1))


def test_a_missing_barrier_is_a_race():
    with pytest.raises(PtxError, match=r"ld.shared.b32 .*: a race: thread 0 of the run reads what thread 63"):
        run(REVERSE.format(barrier=""), random_bits(64), threads=64, shared=256)
    with pytest.raises(PtxError, match="writes something else at the same time"):
        run("mov.u32 %r5, smem; st.shared.b32 [%r5], %r20; mov.u32 %r11, 0;", shared=4)
    again = "bar.sync 0; ld.shared.b32 %r11, [smem]; @%p1 st.shared.b32 [smem], %r20;"
    with pytest.raises(PtxError, match="a race: thread 1 of the run overwrites what thread several of the run read"):
        run(f"setp.eq.b32 %p1, %r20, 1; @%p1 st.shared.b32 [smem], %r20; {again}", threads=64, shared=4)


SUM_OF_RANKS = """
    mov.u32 %r5, smem;
    mov.u32 %r6, %cluster_ctarank;
    setp.ne.b32 %p1, %r20, 0;
    @%p1 bra $L_ready;
    mbarrier.init.shared.b64 [%r5+16], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 %d4, [%r5+16], 16;
    $L_ready: barrier.cluster.arrive.relaxed;
    barrier.cluster.wait;
    setp.gt.u32 %p1, %r20, 3;
    @%p1 bra $L_sent;
    shl.b32 %r7, %r6, 2; add.s32 %r7, %r7, %r5; add.s32 %r8, %r0, 100;
    mapa.shared::cluster.u32 %r9, %r7, %r20;
    add.s32 %r7, %r5, 16;
    mapa.shared::cluster.u32 %r10, %r7, %r20;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r9], %r8, [%r10];
    $L_sent:
    {wait}
    ld.shared.v4.b32 {{%r1, %r2, %r3, %r4}}, [%r5];
    add.s32 %r1, %r1, %r2; add.s32 %r3, %r3, %r4; add.s32 %r11, %r1, %r3;
"""
WAIT = "{ .reg .pred P; AGAIN: mbarrier.try_wait.parity.shared.b64 P, [%r7], 0, 100; @!P bra AGAIN; }"
WAIT = f"add.s32 %r7, %r5, 16; {WAIT}"


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_a_cluster_sends_to_all_of_its_blocks(late, apart):
    got = run(SUM_OF_RANKS.format(wait=WAIT), blocks=8, cluster=4, shared=24, options=Options(late=late, apart=apart))
    # Thread j of block i of a cluster that begins at block b sends 100 + 32 (b + i) + j to block j.
    want = [sum(100 + 32 * (block // 4 * 4 + i) + block % 4 for i in range(4)) for block in range(8)]
    assert got.reshape(8, 32).tolist() == [[number] * 32 for number in want]


@pytest.mark.parametrize("late", [False, True])
def test_reading_what_was_sent_without_waiting_for_it(late):
    with pytest.raises(PtxError, match="stores to a block that has ended" if late else "a race: .* reads what"):
        run(SUM_OF_RANKS.format(wait=""), blocks=4, cluster=4, shared=24, options=Options(late=late))


def test_sending_to_a_block_that_has_not_begun():
    body = SUM_OF_RANKS.replace("barrier.cluster.wait;", "").format(wait=WAIT)
    with pytest.raises(PtxError, match="uses an mbarrier that nobody has initialised"):
        run(body, blocks=4, cluster=4, shared=24, options=Options(late=False, apart=True))


def test_sending_to_a_block_that_has_ended():
    ends = SUM_OF_RANKS.replace("$L_sent:", "$L_sent: setp.eq.b32 %p1, %r6, 1; @%p1 ret;")
    with pytest.raises(PtxError, match="stores to a block that has ended"):
        run(ends.format(wait=WAIT), blocks=4, cluster=4, shared=24)


COPY = """
    mov.u32 %r5, smem; shl.b32 %r6, %r20, 4; add.s32 %r5, %r5, %r6;
    mul.wide.u32 %d4, %r20, 16; add.s64 %d4, %d1, %d4;
    cp.async.ca.shared.global [%r5], [%d4], 16, 16;
    cp.async.commit_group;
    cp.async.ca.shared.global [%r5+512], [%d4], 16, 16;
    cp.async.commit_group;
    cp.async.wait_group {behind};
    ld.shared.b32 %r11, [%r5];
    ld.shared.b32 %r12, [%r5+512];
"""


@pytest.mark.parametrize(("behind", "arrived"), [(0, 2), (1, 1), (2, 0)])
def test_copies_arrive_when_they_are_waited_for(behind, arrived):
    value = [random_bits(32) for _ in range(4)]
    got = run(COPY.format(behind=behind), *value, words_out=2, shared=1024)
    for i, column in enumerate(got):
        np.testing.assert_array_equal(column, value[0] if i < arrived else U32(0xFFFFFFFF))
    got = run(COPY.format(behind=behind), *value, words_out=2, shared=1024, options=Options(late=False))
    np.testing.assert_array_equal(got, [value[0]] * 2)


# --- faults

DEADLOCKS = {
    "a barrier that half the block passes by": (
        "setp.lt.u32 %p1, %r20, 32; @%p1 bra $L_on; bar.sync 0; $L_on: mov.u32 %r11, 0;",
        r"32 threads, among them thread 32 of block 0, wait at line \d+: bar.sync 0",
    ),
    "a shuffle in a branch that lane 0 takes": (
        """mov.u32 %r11, 0; setp.ne.b32 %p1, %r20, 0; @%p1 bra $L_on;
        shfl.sync.idx.b32 %r11, %r20, 0, 31, -1; $L_on: bar.sync 0;""",
        r"1 threads, among them thread 0 of block 0, wait at .*shfl.*; 63 threads, .* bar.sync 0",
    ),
    "an mbarrier that nobody arrives at": (
        """setp.eq.b32 %p1, %r20, 0; @%p1 mbarrier.init.shared.b64 [smem], 1; bar.sync 0; mov.u32 %r11, 0;
        mbarrier.try_wait.parity.shared.b64 %p1, [smem], 0;""",
        r"64 threads, .* wait at .*mbarrier.try_wait",
    ),
}


@pytest.mark.parametrize("name", DEADLOCKS)
def test_deadlocks(name):
    body, message = DEADLOCKS[name]
    with pytest.raises(PtxError, match=f"deadlock in snippet: .*{message}"):
        run(body, threads=64, shared=8)


FAULTS = {
    "out of bounds": ("ld.global.b32 %r11, [%d1+4096];", "thread 0: global address 0x.* lies outside of every tensor"),
    "null": ("mov.b64 %d4, 0; ld.global.b32 %r11, [%d4];", "global address 0x0 lies outside of every tensor"),
    "misaligned": ("ld.global.v2.b32 {%r11, %r12}, [%d1+4];", "is not aligned to the 8 bytes accessed"),
    "one thread of many": (
        "setp.eq.b32 %p1, %r20, 17; mov.u32 %r11, 0; @%p1 st.global.b32 [%d3+8192], %r11;",
        "block 0, thread 17: global address",
    ),
    "out of shared memory": ("ld.shared.b32 %r11, [smem+16];", "shared address 0x410 lies outside of the block's 16"),
    "behind the parameters": ("ld.param.b32 %r11, [snippet_param_1+8];", "param address 0x10 is not within 16 bytes"),
    "no such block": ("mapa.shared::cluster.u32 %r11, %r20, 5;", "names a block behind the cluster's 1"),
    "no mbarrier": (
        "mbarrier.arrive.shared.b64 _, [smem]; mov.u32 %r11, 0;",
        "an mbarrier that nobody has initialised",
    ),
    "no arrival": ("barrier.cluster.wait; mov.u32 %r11, 0;", "waits without having arrived"),
    "division by 0": ("mov.u32 %r1, 0; div.s32 %r11, %r20, %r1;", r"line \d+: div.s32 .* divides by 0"),
    "not a member": ("shfl.sync.bfly.b32 %r11, %r20, 1, 31, 1;", "thread 1: is not among the members"),
    "an absent lane": (
        "mov.u32 %r11, 0; setp.eq.b32 %p1, %r20, 0; @%p1 shfl.sync.idx.b32 %r11, %r20, 1, 31, 1;",
        "thread 0: reads a register of a thread that is not there",
    ),
    "never written": ("add.s32 %r11, %r30, 1;", r"reads %r30@0, which no thread has written"),
    "unknown instruction": ("sin.approx.f32 %r11, %r20;", r"line \d+: sin.approx.f32 .* not known"),
    "unknown modifier": ("add.sat.f32 %r11, %r20, %r20;", r"line \d+: add.sat.f32 .* not known"),
    "unknown register": ("mov.u32 %r11, %clock;", r"line \d+: mov.u32 %r11, %clock;: expected an operand of 32 bits"),
    "undeclared register": ("mov.u32 %r99, 0;", r"line \d+: mov.u32 %r99, 0;: expected an operand, found '%r99'"),
    "unknown label": ("bra $L_nowhere;", r"line \d+: bra \$L_nowhere;: no such label"),
    "another width": ("mov.b64 %d4, %r20;", r"expected an operand of 64 bits"),
    "no instruction": ("= 3;", r"line \d+: expected an instruction, found '= 3;"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(name):
    body, message = FAULTS[name]
    with pytest.raises(PtxError, match=message):
        run(body, shared=16)


EARLY = {
    "reads": ("ld.global.b32 %r11, [%d1]; griddepcontrol.wait;", "before the thread has waited for the kernel ahead"),
    "writes": ("mov.u32 %r11, 1; st.global.b32 [%d3], %r11;", "before the thread has waited for the kernel ahead"),
    "passes on": (
        "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u32 %r11, 0;",
        "the one behind may begin before the one ahead has ended",
    ),
    "in one branch": (
        "setp.eq.b32 %p1, %r20, 0; @%p1 bra $L_on; griddepcontrol.wait; $L_on: ld.global.b32 %r11, [%d1];",
        "thread 0: global address .* before the thread has waited for the kernel ahead",
    ),
}


@pytest.mark.parametrize("name", EARLY)
def test_what_is_done_before_the_kernel_ahead_has_ended(name):
    body, message = EARLY[name]
    with pytest.raises(PtxError, match=message):
        run(body, ahead=Ahead(runs=True))


def test_waiting_for_the_kernel_ahead():
    after = "griddepcontrol.wait; griddepcontrol.launch_dependents; ld.global.b32 %r11, [%d1];"
    assert run(after, ahead=Ahead(runs=True)).tolist() == [0] * 32


def test_a_kernel_behind_a_known_one():
    """Thread i of the one ahead reads number i of `given` and writes it to number i + 1 of `out`."""
    given, out = torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)

    def launch(body, ahead):
        made = parse(
            source(
                f"shl.b32 %r5, %r20, 2; cvt.u64.u32 %d4, %r5; add.s64 %d5, %d0, %d4; add.s64 %d6, %d1, %d4; {body}",
                words_out=0,
            )
        )
        params = pack_params(made, [tensor.data_ptr().to_bytes(8, "little") for tensor in (out, given)])
        return execute(made, (1, 1, 1), [out, given], params, ahead=ahead)

    first = "griddepcontrol.wait; ld.global.b32 %r5, [%d6]; st.global.b32 [%d5+4], %r5;"
    ahead = Ahead(runs=True, traffic=launch(first, Ahead(runs=True)))
    for early, allowed in {
        "ld.global.b32 %r5, [%d6];": True,  # which it reads too
        "ld.global.b32 %r5, [%d5];": False,  # which it writes
        "st.global.b32 [%d5], %r5;": False,
        "st.global.b32 [%d6], %r5;": False,  # which it reads
        "st.global.b32 [%d6+128], %r5;": True,  # of which it knows nothing
    }.items():
        with nullcontext() if allowed else pytest.raises(PtxError, match="which may be using it"):
            launch(f"{early} griddepcontrol.wait;", ahead)


def test_errors_name_the_line():
    lines = source("mov.u32 %r11, 0;\n/* a\ncomment */ sin.approx.f32 %r11, %r11;").splitlines()
    with pytest.raises(PtxError) as raised:
        run("mov.u32 %r11, 0;\n/* a\ncomment */ sin.approx.f32 %r11, %r11;")
    number = int(str(raised.value).split(":")[0].removeprefix("line "))
    assert "sin.approx" in lines[number - 1]


def test_hints_have_no_effect_on_values():
    body = """
    createpolicy.fractional.L2::evict_last.b64 %d4, 1.0;
    prefetch.global.L2 [%d1];
    membar.gl;
    ld.global.L1::evict_last.L2::cache_hint.b32 %r11, [%d1], %d4;
    """
    assert run(body, np.full(32, 5, U32)).tolist() == [5] * 32
