"""A scripted agent for qknorm_rope: it tries two variants of the kernel, two configurations and a deliberate mistake.

Like any agent it works in a campaign's worktree and only through `kda campaign`, so a short campaign can be recorded
without a language model. `example_campaign.sh` launches it. BUDGET_S: no iteration begins after so many seconds.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

TASK = Path("diffusion/k03_qknorm_rope")
KERNEL, TABLE = TASK / "solution" / "qknorm_rope.py", TASK / "solution" / "tuned.toml"
LOADS = "    # Loads of all tiles first:"
SHARED = re.compile(r"    angles = [^\n]*\n    cos_a, [^\n]*, EARLY\)\n\n")
SMALL, LARGE = (
    ("qwen-19*", "qwen-47*", "qwen-edit-1*", "zimage-32*", "flux-512*"),
    ("*-4096*", "*-4608*", "*-8424*", "*-4128*", "*-7904*"),
)
DIRECTION = (
    "give up the order of the loads, which the scheduler hides, and try how many heads a program takes, since the "
    "profile shows registers to spare"
)


class Step(NamedTuple):
    """One idea: an edit of a file, and the rows that decide."""

    hypothesis: str
    file: Path
    edit: Callable[[str], str]
    rows: tuple[str, ...] = ()


def positions_first(text: str) -> str:
    """Load the position before anything else: the address of the table's row depends on it."""
    place = "    place = tl.load(positions + token).to(tl.int64)\n"
    text = text.replace(
        "cache + tl.load(positions + token).to(tl.int64) * CACHE_STRIDE", "cache + place * CACHE_STRIDE"
    )
    return text.replace(LOADS, f"{place}{LOADS}", 1)


def tables_first(text: str) -> str:
    """Load everything that the heads share before the heads."""
    shared = SHARED.search(text)
    return text if shared is None else SHARED.sub("", text, count=1).replace(LOADS, f"{shared[0]}{LOADS}", 1)


def half_the_squares(text: str) -> str:
    """The deliberate mistake: divide by half of the head."""
    return text.replace("tl.rsqrt(squares / DIM + EPS)", "tl.rsqrt(squares / (DIM // 2) + EPS)")


def configure(entry: int, config: str) -> Callable[[str], str]:
    """An edit that puts another configuration into the table's entry of this number."""

    def edit(text: str) -> str:
        head, *entries = re.split(r"(?m)^(?=\[\[)", text)
        entries[entry] = re.sub(r"(?m)^config = .*$", f"config = {config}", entries[entry])
        entries[entry] = re.sub(r"(?m)^reason = .*$", 'reason = "a try of a scripted agent, not swept"', entries[entry])
        return head + "".join(entries)

    return edit


STEPS = (
    Step("the position is loaded before the heads: the table's row arrives sooner", KERNEL, positions_first),
    Step("divide by half of the head: one constant less", KERNEL, half_the_squares),
    Step("cos, sin and weights are loaded before the heads: the longest chain starts first", KERNEL, tables_first),
    Step(
        "few tokens: 2 warps a program spread the heads further", TABLE, configure(0, "{warps = 2, tiles = 1}"), SMALL
    ),
    Step("many tokens: 8 warps, fewer programs", TABLE, configure(1, '{warps = 8, tiles = 1, store = ".cs"}'), LARGE),
)


def kda(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a kda command and print its output."""
    done = subprocess.run([sys.executable, "-m", "kda_tools", *words], capture_output=True, text=True, check=False)
    print(f"$ kda {' '.join(words)}\n{done.stdout}{done.stderr}exit code {done.returncode}\n", flush=True)
    return done


def main() -> None:
    """Try every step that the time allows, then run `kda campaign review` and `kda campaign status`."""
    start, budget = time.monotonic(), float(os.environ.get("BUDGET_S", "190"))
    for step in STEPS:
        if time.monotonic() - start > budget:
            print(f"not tried for lack of time: {step.hypothesis}")
            continue
        before = step.file.read_text(encoding="utf-8")
        after = step.edit(before)
        if after == before:
            print(f"not tried, since the best so far has it: {step.hypothesis}")
            continue
        step.file.write_text(after, encoding="utf-8")
        words = ["campaign", "iterate", "-m", step.hypothesis, *(word for row in step.rows for word in ("--rows", row))]
        if "needs --direction" in kda(*words).stderr:
            kda("profile", "qknorm_rope", "--row", "qwen-edit-189x24x128")
            kda(*words, "--direction", DIRECTION)
    kda("campaign", "review")
    kda("campaign", "status")


if __name__ == "__main__":
    main()
