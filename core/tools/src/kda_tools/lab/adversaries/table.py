"""Every adversary and how its row must end, on a CPU and on a GPU."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from kda_judge.evidence.run_record import Verdict

ARMS = Path(__file__).parent / "arms"
Kind = Literal["cpu", "cuda"]
OUT, INPLACE, LOOSE = "out-64x16", "inplace-64x16", "loose-64x16"
LARGE, TAIL, INPLACE_LARGE = "large-4096x8192", "tail-67x16", "inplace-large-4096x8192"
PASSES = {"cpu": (Verdict.CORRECT,), "cuda": (Verdict.FASTER, Verdict.NOT_FASTER)}
"""Verdicts with which the row of an honest arm ends."""
NOISY = "noisy"
"""Name of the ending in which the row passes like an honest arm's, but the run is noisy and cannot be published."""


@dataclass(frozen=True)
class Ending:
    """How a row must end on one kind of machine."""

    verdict: Verdict | None
    """The expected verdict; None for that of an honest arm."""
    words: str = ""
    """Regular expression that must match in the reason."""
    noisy: bool = False
    """Whether the whole run, not the row, is marked, so that it cannot be published."""
    missed: str = ""
    """What the adversary gains although its row passes like an honest arm's; empty if it gains nothing."""

    @property
    def caught(self) -> bool:
        """Whether the adversary gains nothing."""
        return not self.missed

    @property
    def name(self) -> str:
        """The verdict in one word, `noisy` or `passes`."""
        return self.verdict.value if self.verdict else NOISY if self.noisy else "passes"


@dataclass(frozen=True)
class Adversary:
    """One arm of `arms/`."""

    name: str
    cpu: Ending | None
    """The ending on a CPU; None if its effect cannot show there."""
    cuda: Ending | None
    row: str = OUT
    cuda_row: str | None = None
    """The row on a GPU, if it is another one."""
    opponent: bool = False
    """Whether it runs against `eager` on a CPU. Most run against themselves there, which saves a second worker."""
    generations: int = 1
    loops: bool = False
    """Whether samples on a CPU are as long as a GPU's, thousands of calls. Otherwise a sample there is one call."""

    @cached_property
    def docstring(self) -> str:
        """The arm file's docstring: what it does, and `Caught by: ...`."""
        return ast.get_docstring(ast.parse((ARMS / f"{self.name}.py").read_text(encoding="utf-8"))) or ""

    @property
    def does(self) -> str:
        """What it does, in a sentence."""
        return self.docstring.partition("\n\n")[0].replace("\n", " ")

    def on(self, kind: Kind) -> Ending | None:
        """How its row must end on `kind`; None where it is not run."""
        return self.cpu if kind == "cpu" else self.cuda


INCORRECT, ERROR, INVALID, TIMEOUT = Verdict.INCORRECT, Verdict.ERROR, Verdict.INVALID, Verdict.TIMEOUT


def caught(
    name: str,
    verdict: Verdict,
    words: str,
    row: str = OUT,
    cuda: Ending | None = None,
    *,
    opponent: bool = False,
    loops: bool = False,
) -> Adversary:
    """An adversary that ends the same on both kinds of machine, unless `cuda` gives another ending for a GPU."""
    ending = Ending(verdict, words)
    return Adversary(name, ending, cuda or ending, row=row, opponent=opponent, loops=loops)


def harmless(
    name: str, kinds: tuple[Kind, ...] = ("cpu", "cuda"), *, loops: bool = False, opponent: bool = False
) -> Adversary:
    """An adversary without effect: its row passes like an honest arm's, and should."""
    cpu, cuda = (Ending(None) if kind in kinds else None for kind in ("cpu", "cuda"))
    return Adversary(name, cpu, cuda, loops=loops, opponent=opponent)


def missed(
    name: str,
    gain: str,
    cuda: Ending | None = None,
    *,
    row: str = OUT,
    cuda_row: str | None = None,
    loops: bool = False,
) -> Adversary:
    """An adversary that is not caught on a CPU, nor on a GPU unless `cuda` gives another ending."""
    ending = Ending(None, missed=gain)
    return Adversary(name, ending, cuda or ending, row=row, cuda_row=cuda_row, loops=loops)


TOO_FAST = Ending(INVALID, "us is less than")
"""Ending by the physical checks: wall against device time, and both against the machine's limits."""
CHANGED = Ending(None, "changed on disk during the run", noisy=True)
BEYOND_HOST = Ending(ERROR, "claims more time between events than passed on its host")
"""Ending by the two clocks of a replay, which the judge compares at once."""
REMEMBERED = "is the previous call's result: it was remembered, not computed"
REPLACED = "replaced while a loop of calls was running"
WRONG = "elements outside tolerance"
TWICE = "more than twice the baseline's"
USED = "lies in the memory of another output that is still in use"
OVERRUN = "wrote past the beginning or the end of memory that it allocated"
LEFT = r"left processes running in a session of their own: (sleep 30|\[sleep\])"
"""A process that has begun its program may have no command line yet; then it is named by the program."""
NO_TIME = "no time is kept on a CPU, and only the last output of a loop is compared"

ADVERSARIES = (
    # Results that were not computed
    # On a GPU the call that they remember is one whose result nobody checked.
    caught("remembers_by_pointer", INCORRECT, REMEMBERED, cuda=Ending(INCORRECT, WRONG)),
    caught("remembers_by_version", INCORRECT, REMEMBERED, cuda=Ending(INCORRECT, WRONG)),
    caught("remembers_by_content", INCORRECT, USED),
    caught("copies_what_it_remembers", INCORRECT, "remembered, not computed|while a loop", loops=True),
    caught("remembers_half_of_the_work", INCORRECT, REPLACED, loops=True),
    # A CPU's allocator writes into freed memory.
    Adversary("trusts_stale_memory", None, Ending(INCORRECT, REPLACED), row=LARGE),
    caught("skips_repeated_calls", INCORRECT, REPLACED),
    caught("takes_its_time_in_the_audit", INCORRECT, REPLACED, opponent=True, loops=True),
    Adversary("remembers_in_a_capture", None, Ending(INCORRECT, "a 64th of them drawn again")),
    caught("noop_in_place", INCORRECT, "output 'x'", INPLACE),
    missed("works_only_on_the_canary", NO_TIME, TOO_FAST, row=INPLACE, cuda_row=INPLACE_LARGE, loops=True),
    caught("returns_the_input", INCORRECT, "'out' is an alias of an input"),
    caught("returns_a_copy_of_the_input", INCORRECT, WRONG),
    caught("returns_zeros", INCORRECT, WRONG),
    caught("constant", INCORRECT, TWICE, LOOSE, opponent=True),
    caught("constant_in_the_loop", INCORRECT, TWICE, LOOSE, opponent=True, loops=True),
    Adversary("detects_the_profiler", None, Ending(INCORRECT, TWICE), row=LOOSE),
    Adversary("forges_the_kernel_count", None, Ending(INCORRECT, TWICE), row=LOOSE),
    # Wrong values
    caught("nan", INCORRECT, r"worst at \[3, 5\].*got nan; 1 not finite"),
    caught("one_wrong_element", INCORRECT, r"1 of \d+ elements outside tolerance; worst at \[(7|63), 15\]"),
    caught("wrong_in_a_thousandth", INCORRECT, r"\d+ of \d+ elements outside tolerance", LARGE),
    caught("wrong_for_large_offsets", INCORRECT, WRONG, LARGE),
    caught("wrong_in_the_last_rows", INCORRECT, r"\d+ of \d+ elements outside tolerance", TAIL),
    caught("wrong_on_the_second_call", INCORRECT, "elements outside tolerance.*seed (11|23)"),
    caught("lower_precision", INCORRECT, WRONG),
    caught("coarser_within_tolerance", INCORRECT, TWICE, LOOSE, opponent=True),
    caught("coarse_but_not_at_the_worst", INCORRECT, "error of all elements", LOOSE, opponent=True),
    # Its thread cannot reach a GPU's memory.
    Adversary("loosens_the_yardstick", Ending(INCORRECT, TWICE), None, row=LOOSE, opponent=True),
    caught("knows_the_seeds", INCORRECT, r"got 0 \[inputs: offset"),
    caught("wrong_beyond_the_draws", INCORRECT, r"got 1e\+09 \[inputs: mixed"),
    caught("wrong_when_unaligned", INCORRECT, r"elements outside tolerance.*\[inputs: normal, seed \d+, in slices\]"),
    # Form
    caught("returns_none", INCORRECT, "expected 1 tensor, got None"),
    caught("returns_two", INCORRECT, "expected 1 tensor, got tuple of 2"),
    caught("returns_a_tuple_of_one", INCORRECT, "expected 1 tensor, got tuple of 1"),
    caught("computes_when_looked_at", INCORRECT, "expected 1 tensor, got Later"),
    caught("returns_a_number", INCORRECT, "expected 1 tensor, got float"),
    caught("returns_in_place", INCORRECT, "expected None", INPLACE),
    caught("wrong_shape", INCORRECT, r"output 'out': expected shape \[(8|64), 16\], got \[16, (8|64)\]"),
    caught("wrong_dtype", INCORRECT, "expected dtype float32, got float64"),
    caught("wrong_device", INCORRECT, "expected device (cpu|cuda:0), got meta"),
    caught("wrong_stride", INCORRECT, r"expected stride \[16, 1\], got \[1, (8|64)\]"),
    caught("lazy_subclass", INCORRECT, "expected type Tensor, got Lazy"),
    caught("namesake", INCORRECT, r"expected type Tensor, got Tensor \(subclass\)"),
    # Memory
    caught("changes_input", INCORRECT, "input 'y' was changed"),
    caught("writes_gaps", INCORRECT, "memory between the elements of the strided 'y' was changed"),
    caught("out_of_bounds", INCORRECT, "wrote outside its tensors"),
    caught("overruns_its_output", INCORRECT, OVERRUN),
    caught("writes_before_its_output", INCORRECT, OVERRUN),
    caught("unwritten", INCORRECT, "48 of (128|1024) elements outside tolerance"),
    caught("one_buffer", INCORRECT, USED),
    caught("four_buffers", INCORRECT, USED),
    caught("exhausts_memory", ERROR, "raised .*memory"),
    caught("killed_for_memory", ERROR, "was killed by SIGKILL during '(warm|verify)'"),
    # Work at another time or place
    caught("starts_a_thread", INCORRECT, WRONG),
    caught("computes_at_the_copy", INCORRECT, WRONG),
    caught("computes_in_a_mode", INCORRECT, WRONG),
    caught("patches_the_worker", INCORRECT, WRONG),
    Adversary("side_stream", None, Ending(INVALID, "events .* us is less than"), row=LARGE),
    harmless("slows_the_other_arm", opponent=True, loops=True),
    caught("renices_the_other_arm", INVALID, "the priority of arm 'eager' was changed", opponent=True),
    caught("demotes_the_other_arm", INVALID, "the scheduling policy of arm 'eager' was changed", opponent=True),
    # On a CPU workers are not pinned.
    Adversary("moves_the_other_arm", None, Ending(INVALID, "the affinity of arm '\\w+' was changed")),
    harmless("stops_the_other_arm", loops=True, opponent=True),
    harmless("works_in_short_lives", opponent=True),  # in loops on few cores it costs its own clock up to 2%
    caught("kills_the_other_arm", ERROR, "arm 'eager' was killed by SIGKILL", opponent=True),
    caught("leaves_a_child_behind", INVALID, LEFT),
    caught("leaves_a_daemon_behind", INVALID, LEFT),
    caught("kills_its_supervisor", ERROR, "was killed by SIGKILL during '"),
    harmless("works_in_a_child", opponent=True, loops=True),
    # Clocks and counts
    harmless("patches_the_clock", loops=True),
    caught("slows_its_clock", INVALID, r"claims (49|50)\.\d% less time than passed", cuda=BEYOND_HOST, loops=True),
    caught("forges_its_time", INVALID, r"wall: claims 6[67]\.\d% less time than passed", cuda=BEYOND_HOST, loops=True),
    caught("shaves_its_time", INVALID, r"wall: claims [234]\.\d% less time than passed", loops=True),
    caught("shaves_brief_samples", INVALID, r"wall: claims 3[0-9]\.\d% less time than passed", loops=True),
    caught("shortens_its_samples", INVALID, "wall: claims more time than passed", loops=True),
    caught("forges_its_calls", ERROR, r"says that it made \d+ calls of \d+"),
    caught("claims_no_calls", ERROR, "answer to wall has the wrong form"),
    caught("claims_no_time", ERROR, "answer to wall has the wrong form"),
    harmless("replaces_the_event", kinds=("cuda",)),
    Adversary("patches_elapsed_time", None, Ending(INVALID, "device: (the judge's clock saw|claims)")),
    Adversary("shaves_elapsed_time", None, Ending(INVALID, r"device: claims [234]\.\d% less time than passed")),
    harmless("patches_synchronize", kinds=("cuda",)),
    Adversary("patches_graph_replay", None, Ending(INCORRECT, "output 'out'")),
    # The judge's channel, processes, files
    harmless("prints"),
    caught("writes_to_the_channel", ERROR, "wrote garbage on the judge's channel"),
    caught("forges_a_reply", ERROR, "wrote garbage on the judge's channel"),
    caught("floods_the_channel", ERROR, r"a line longer than \d+ bytes"),
    caught("nests_its_reply", ERROR, "wrote garbage on the judge's channel"),
    caught("swells_its_log", ERROR, "exited with code 1 during '(warm|verify)'"),
    caught("forges_the_terminal", ERROR, r"exited with code 0 during '(warm|verify)'\n    \| \\x1b\[2J"),
    caught("raises", ERROR, r"'raises' raised RuntimeError: no such kernel image \(raises.py"),
    caught("raises_on_import", ERROR, "ImportError: libmissing.so"),
    caught("lacks_the_op", ERROR, "has no callable 'axpy'"),
    caught("segfaults", ERROR, "was killed by SIGSEGV during '(warm|verify)'"),
    caught("exits", ERROR, "exited with code 0 during '(warm|verify)'\n    | all rows FASTER"),
    caught("hangs", TIMEOUT, r"no answer within \d+ s to '(warm|verify)'"),
    harmless("imports_the_other_arm"),
    harmless("imports_the_oracle"),
    harmless("reseeds_the_generator"),
    caught("edits_the_contract", INCORRECT, WRONG),
    Adversary("edits_the_baseline", CHANGED, CHANGED, opponent=True, generations=2),
    Adversary("poisons_the_bytecode", CHANGED, CHANGED, opponent=True, generations=2),
)
