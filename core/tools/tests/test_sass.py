"""What is read off machine code: of lines by hand, and of kernels compiled for both targets."""

import re

import pytest
import torch
import triton
import triton.language as tl

from kda_judge.contract.errors import MissingRequirement
from kda_runtime.launch import Launch
from kda_tools.lab.inspect import sass


def line(address: int, text: str, sets: int | None = None, waits: tuple[int, ...] = ()) -> str:
    """As cuobjdump prints it; `sets` and `waits` are scoreboards."""
    control = (7 if sets is None else sets) << 46 | sum(1 << 52 + board for board in waits)
    return f"  /*{address:04x}*/   {text} ;   /* 0x{1:016x} */\n     /* 0x{control:016x} */\n"


def code(*lines: tuple[str, int | None, tuple[int, ...]]) -> sass.Code:
    text = "".join(line(16 * place, *one) for place, one in enumerate(lines))
    return sass.summary(sass.instructions(text))


def test_an_instruction() -> None:
    (one,) = sass.instructions(line(0x1D0, "@!P0 LDG.E.EF.128 R8, desc[UR6][R24.64+0x800]", 2, (0, 5)))
    assert one == sass.Instruction(
        0x1D0, "@!P0", ("LDG", "E", "EF", "128"), "R8, desc[UR6][R24.64+0x800]", 2, frozenset({0, 5})
    )
    assert one.width == 16


def test_accesses_are_counted_by_width() -> None:
    found = code(
        ("LDG.E.128 R4, desc[UR4][R2.64]", 0, ()),
        ("LDG.E.LTC128B.64 R8, desc[UR4][R2.64]", 0, ()),
        ("@P0 LDG.E.U16.CONSTANT R10, desc[UR4][R2.64]", 1, ()),
        ("@!P0 LDG.E.U16 R11, desc[UR4][R2.64]", 1, ()),
        ("@!PT LDG.E.128 RZ, [RZ]", 1, ()),
        ("STG.E desc[UR4][R2.64], R10", None, (0, 1)),
        ("STG.E.U8 desc[UR4][R2.64], R10", None, ()),
        ("LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64]", None, ()),
        ("UBLKCP.S.G [UR4], [UR6], UR8", None, ()),
        ("RED.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R5", None, ()),
        ("ATOMG.E.ADD.STRONG.GPU PT, R4, desc[UR4][R2.64], R5", None, ()),
        ("LDL.64 R4, [R1]", None, ()),
        ("STL [R1+0x4], R4", None, ()),
        ("LDS.128 R4, [R1]", None, ()),
        ("EXIT", None, ()),
        ("BRA 0xf0", None, ()),
        ("NOP", None, ()),
    )
    assert found == sass.Code(
        instructions=15,
        loops=0,
        loads=((16, 1), (8, 1), (2, 2)),
        stores=((4, 1), (1, 1)),
        copies=((16, 1),),
        bulk=1,
        atomics=2,
        local=2,
        in_flight=None,
        trips=None,
    )


def test_a_loop_is_a_jump_backwards() -> None:
    assert code(("FADD R0, R0, R1", None, ()), ("@P0 BRA 0x0", None, ()), ("@P1 BRA 0x40", None, ())).loops == 1


def test_bytes_are_in_flight_until_their_scoreboard_is_waited_for() -> None:
    load = "LDG.E.128 R4, desc[UR4][R2.64]"
    use = "FADD R0, R4, R8"
    assert code((load, 0, ()), (load, 1, ()), (use, None, (0, 1))).in_flight == 32
    assert code((load, 0, ()), (use, None, (0,)), (load, 0, ()), (use, None, (0,))).in_flight == 16
    # The second is under way while the first is waited for; the third shares the second's scoreboard.
    assert code((load, 0, ()), (load, 1, ()), (use, None, (0,)), (load, 1, ()), (load, 2, ())).in_flight == 48
    assert code((use, None, ())).in_flight == 0
    # Values from shared memory and special registers use the same scoreboards.
    assert code(("LDS.128 R4, [R1]", 0, ()), ("S2R R1, SR_TID.X", 1, ()), (load, 2, ())).in_flight == 16


def test_a_round_trip_is_a_wait_for_a_load_behind_the_last_wait() -> None:
    load = "LDG.E.128 R4, desc[UR4][R2.64]"
    use = "FADD R0, R4, R8"
    assert code((use, None, (0,)), (load, 0, ())).trips == 0
    assert code((load, 0, ()), (load, 1, ()), (use, None, (0,)), (use, None, (1,))).trips == 1
    assert code((load, 0, ()), (use, None, (0,)), (load, 0, ()), (use, None, (0,))).trips == 2
    # The second is issued behind the first wait: it counts, whether it has come by the second wait or not.
    assert code((load, 0, ()), (use, None, (0,)), (load, 1, ()), (use, None, ()), (use, None, (1,))).trips == 2
    # A scoreboard that is shared is free when its last load has come.
    assert code((load, 0, ()), (load, 1, ()), (use, None, (1,)), (load, 0, ()), (use, None, (0,))).trips == 2
    assert code(("LDS.128 R4, [R1]", 0, ()), (use, None, (0,))).trips == 0


@triton.jit
def copy_kernel(y, x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * 2 * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(x + i, mask=i < n)
    second = tl.load(x + i + BLOCK, mask=i + BLOCK < n)
    tl.store(y + i, first, mask=i < n)
    tl.store(y + i + BLOCK, second, mask=i + BLOCK < n)


@triton.jit
def gather_kernel(y, x, index, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + tl.load(index + i)))


@triton.jit
def row_sum(y, x, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + tl.program_id(0), tl.sum(tl.load(x + tl.program_id(0) * BLOCK + i), axis=0))


def of(kernel: object, target: str, *args: object, **options: object) -> tuple[bytes, sass.Contents]:
    cubin = Launch.make(kernel, (1,), *args, **options).compile(target).cubin
    return cubin, sass.contents(cubin)


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_wide_and_narrow_kernels(target: str) -> None:
    y = torch.empty(1, dtype=torch.float32, device="meta")
    _, wide = of(copy_kernel, target, y, y, 4096, BLOCK=512, num_warps=4)
    assert (wide.threads, wide.shared_bytes, wide.local_bytes) == (128, 0, 0)
    assert (wide.code.loads, wide.code.stores) == (((16, 2),), ((16, 2),))
    assert (wide.code.in_flight, wide.code.trips) == (32, 1)
    assert (wide.code.atomics, wide.code.local, wide.code.loops) == (0, 0, 0)
    # A size that 16 bytes do not divide: every element by itself.
    _, narrow = of(copy_kernel, target, y, y, 4097, BLOCK=512, num_warps=4)
    assert (narrow.code.loads, narrow.code.stores) == (((4, 8),), ((4, 8),))
    assert narrow.code.instructions > wide.code.instructions


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_an_address_that_is_loaded_is_a_round_trip_more(target: str) -> None:
    x = torch.empty(1, dtype=torch.float32, device="meta")
    index = torch.empty(1, dtype=torch.int32, device="meta")
    assert of(gather_kernel, target, x, x, index, BLOCK=512, num_warps=4)[1].code.trips == 2


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_what_the_system_reserves_is_not_the_kernels(target: str) -> None:
    x = torch.empty(1, dtype=torch.float32, device="meta")
    cubin, found = of(row_sum, target, x, x, BLOCK=1024, num_warps=4)
    assert "SHARED:1024" in sass.dump(cubin, "-res-usage")
    assert found.shared_bytes == 0


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_no_loaded_register_is_read_before_its_scoreboard_is_waited_for(target: str) -> None:
    """So the bits are where they are taken to be."""
    x = torch.empty(1, dtype=torch.bfloat16, device="meta")
    uses = 0
    for cubin in (
        of(copy_kernel, target, x, x, 4097, BLOCK=1024, num_warps=4)[0],
        of(row_sum, target, x, x, BLOCK=8192, num_warps=4)[0],
    ):
        code = sass.instructions(sass.dump(cubin, "-sass"))
        for place, load in enumerate(code):
            if load.parts[0] != "LDG":
                continue
            first = int(load.operands[1 : load.operands.index(",")])
            loaded = {f"R{first + i}" for i in range(max(1, load.width // 4))}
            waited = False
            for later in code[place + 1 :]:
                waited = waited or load.sets in later.waits
                if loaded & set(re.findall(r"\bR\d+\b", later.operands)):
                    assert waited, (load, later)
                    uses += 1
                    break
    assert uses >= 24


def test_an_unreadable_cubin_is_an_error() -> None:
    with pytest.raises(MissingRequirement, match=r"cuobjdump cannot read the cubin: \w"):
        sass.contents(b"not a cubin")
