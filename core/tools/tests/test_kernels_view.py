"""The table of `kda compile`."""

import io
from dataclasses import replace

from rich.console import Console

from kda_tools.lab.inspect.aot import CompiledKernel
from kda_tools.lab.inspect.sass import Code
from kda_tools.publish.kernels_view import differences, print_kernels

CODE = Code(
    instructions=363,
    loops=0,
    loads=((16, 9), (2, 8)),
    stores=((16, 3),),
    copies=(),
    bulk=0,
    atomics=0,
    local=0,
    in_flight=112,
    trips=2,
)
KERNEL = CompiledKernel(
    name="norm",
    variant="x:float32 N=3072 num_warps=4",
    target="sm_90a",
    rows=("a", "b", "c", "d", "e"),
    registers=63,
    shared_bytes=16,
    spill_bytes=0,
    seconds=1.0,
    threads=128,
    code=CODE,
)
WIDE = replace(KERNEL, variant="x:float32 N=5120 num_warps=4", rows=("wide",), registers=95)


def shown(*kernels: CompiledKernel, terminal: bool = False) -> list[str]:
    out = io.StringIO()
    print_kernels(Console(file=out, width=100, force_terminal=terminal, color_system=None), kernels)
    return out.getvalue().splitlines()


def numbers(lines: list[str]) -> list[dict[str, str]]:
    """The lines that begin with a target, by what is above their cells."""
    head = next(line for line in lines if line.lstrip().startswith("target"))
    names = head.split()
    rows = [line.split(None, len(names) - 2) for line in lines if line.lstrip().startswith("sm_")]
    return [dict(zip(names, row, strict=False)) for row in rows]


def test_numbers_of_a_variant() -> None:
    (row,) = numbers(shown(KERNEL))
    assert (row["threads"], row["regs"], row["smem"]) == ("128", "63", "16")
    assert (row["code"], row["trips"]) == ("363", "2")
    # 64 registers x 32 a warp: 8 warps in each of four partitions; 8 blocks of 128 threads with 112 bytes each.
    assert (row["blocks"], row["warps"], row["limit"], row["flight"]) == ("8", "32/64", "regs", "112/48")
    assert any("9x16 8x2  3x16" in line for line in shown(KERNEL))
    assert shown(KERNEL)[-1] == "no kernel spills registers"


def test_variants_show_what_differs_and_their_rows() -> None:
    lines = shown(KERNEL, WIDE, replace(KERNEL, target="sm_100a"), replace(WIDE, target="sm_100a"))
    assert "norm, 2 variants; unless said otherwise: x:float32 N=3072 num_warps=4" in lines
    wide = lines.index("  wide")
    assert lines[wide + 1] == "    N=5120"
    assert [line.split()[0] for line in lines[wide + 2 : wide + 4]] == ["sm_90a", "sm_100a"]
    first = lines.index("  a, b, c, +2")
    assert [line.split()[0] for line in lines[first + 1 : first + 3]] == ["sm_90a", "sm_100a"]


def test_variants_with_equal_numbers_are_shown_once() -> None:
    twin = replace(KERNEL, variant="x:float32 N=3072 num_warps=4 wave:i32", rows=("b", "z"))
    other = replace(twin, variant="x:float32 N=3072 num_warps=4 wave:i32%16", rows=("y",))
    lines = shown(KERNEL, twin, other, WIDE)
    assert "  a, b, c, +4" in lines
    assert len(numbers(lines)) == 2


def test_the_usual_parts_are_those_of_most() -> None:
    usual, own = differences(["N=1 x:a", "N=2 x:a", "N=1 x:b maxnreg=64"])
    assert usual == ["N=1", "x:a"]
    assert own == {"N=1 x:a": [], "N=2 x:a": ["N=2"], "N=1 x:b maxnreg=64": ["x:b", "maxnreg=64"]}
    # Words without a name are told apart by their place.
    assert differences(["half half", "half float"])[1]["half float"] == ["float"]


def test_spills_are_marked() -> None:
    spilled = replace(KERNEL, spill_bytes=24, code=replace(CODE, local=7))
    assert "      ! 24 bytes a thread in local memory, 7 accesses to it" in shown(spilled)
    assert not any("!" in line for line in shown(KERNEL))


def test_what_few_kernels_have_is_in_words() -> None:
    odd = replace(KERNEL, code=replace(CODE, loops=1, atomics=2, bulk=3, copies=((16, 4),), in_flight=None, trips=None))
    lines = shown(odd)
    assert "      atomics: 2; bulk copies: 3; loops, whose code counts once: 1; asynchronous copies: 4x16" in lines
    assert (numbers(lines)[0]["flight"], numbers(lines)[0]["trips"]) == ("-", "-")


def test_unknown_targets_and_threads_have_no_occupancy() -> None:
    for kernel in (replace(KERNEL, target="sm_80"), replace(KERNEL, threads=None)):
        (row,) = numbers(shown(kernel))
        assert [row[name] for name in ("blocks", "warps", "limit", "flight")] == ["-"] * 4


def test_full_multiprocessors_are_limited_by_nothing() -> None:
    (row,) = numbers(shown(replace(KERNEL, registers=32)))
    assert (row["warps"], row["limit"]) == ("64/64", "-")
    (row,) = numbers(shown(replace(KERNEL, registers=16, threads=96)))
    assert (row["warps"], row["limit"]) == ("63/64", "warps")


def test_a_terminal_is_wrapped_and_a_pipe_is_not() -> None:
    long = replace(KERNEL, variant=" ".join(f"PART_{i}=1" for i in range(40)))
    assert max(map(len, shown(long, terminal=True))) <= 100
    piped = shown(long)
    assert any(line.endswith("PART_39=1") and "PART_0=1" in line for line in piped)
    assert not any(line.endswith(" ") for line in piped)
