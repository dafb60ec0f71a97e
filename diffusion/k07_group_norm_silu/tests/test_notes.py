"""Numbers of docs/dispatch.md follow from what is recorded, docs/tuning.jsonl, or from what the compilers make."""

import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import triton

from kda_runtime.launch import Launch
from kda_tools.lab.inspect import sass

from ..solution.plans import FLOW, TUNED, Call, Config, plan

DOCS = Path(__file__).parents[1] / "docs"
ROWS = ("hunyuanvideo-vae-1x512x9x128x40", "hunyuanvideo-vae-1x512x9x128x128")
FORMS = {
    "2026-11-20T20:18:38Z": "a part at a time",
    "2026-11-20T20:27:01Z": "the next part is loaded while this one waits, and said behind it",
    "2026-11-20T20:30:51Z": "the next part is loaded and said, then this one waits",
    "2026-11-20T20:39:50Z": "the part behind the next is loaded where this one is written, tile by tile",
    "2026-11-20T23:25:48Z": "parts come by asynchronous copies, and two reductions do for five",
}


DECIDED = "2026-11-21T00:02:12Z"
"""The sweep that the tables come from."""
COMPARED = (
    "1x128x5x96x80",
    "1x512x3x128x40",
    "1x256x3x128x128",
    "1x512x9x128x40",
    "1x512x9x128x128",
    "1x256x17x256x256",
)


class Sweep:
    """A recorded sweep of the one table."""

    def __init__(self, utc: str) -> None:
        (sweep,) = (s for s in map(json.loads, (DOCS / "tuning.jsonl").read_text().splitlines()) if s["utc"] == utc)
        (table,) = sweep["tables"]
        self.commit = sweep["commit"][:10]
        self.candidates = table["candidates"]
        self.rows = {row["row"]: row for row in table["rows"]}

    def best(self, row: str, method: str) -> str:
        """Of all configurations of a method, in us."""
        timed = zip(self.candidates, self.rows[row]["median_us"], strict=True)
        found = [us for config, us in timed if us is not None and config["method"] == method]
        return f"{min(found):.1f}" if found else "-"

    def copy(self, row: str) -> str:
        return f"{self.rows[row]['copy_us']:.1f}"


def told(utc: str, form: str) -> str:
    """The line that the table under "Tried and left" has for a sweep."""
    sweep = Sweep(utc)
    cells = [", ".join([*(sweep.best(row, m) for m in ("hold", "flow", "stretch")), sweep.copy(row)]) for row in ROWS]
    return f"| {form} | {utc}, `{sweep.commit}` | {' | '.join(cells)} |"


def compared(short: str) -> str:
    """The line that the table under "Configurations" has for a row."""
    sweep, row = Sweep(DECIDED), f"hunyuanvideo-vae-{short}"
    times = [sweep.best(row, method) for method in ("cluster", "stretch", "flow", "ring")]
    return f"| {short} | {' | '.join([*times, sweep.copy(row)])} |"


@pytest.mark.parametrize("utc", FORMS)
def test_forms_that_were_tried(utc):
    assert told(utc, FORMS[utc]) in (DOCS / "dispatch.md").read_text().splitlines()


@pytest.mark.parametrize("row", COMPARED)
def test_methods_that_were_compared(row):
    assert compared(row) in (DOCS / "dispatch.md").read_text().splitlines()


CODE = {
    # kernel: the production row's x, what is chosen for it
    "whole, 16 warps, 8 tiles": ("1x512x2x32x32", Config("whole", 16)),
    "output, 4 warps, 4 tiles, up to 32 parts": ("1x512x5x32x32", Config("stretch", 4, 4)),
    "output, 4 warps, 8 tiles, up to 64 parts": ("1x512x3x48x128", Config("stretch", 4, 8)),
    "output, 4 warps, 8 tiles, up to 256 parts": ("1x256x9x128x128", Config("stretch", 4, 8)),
    "flow, 8 warps, 6 tiles": ("1x512x9x128x128", FLOW),
    "cluster, 4 blocks of 4 warps, 3 tiles": ("1x512x5x12x10", Config("cluster", 4, blocks=4)),
    "cluster, 8 blocks of 8 warps, 3 tiles": ("1x512x2x64x20", Config("cluster", 8, blocks=8)),
    "cluster, 16 blocks of 8 warps, 5 tiles": ("1x128x5x96x80", Config("cluster", 8, blocks=16)),
    "ring, 4 warps, 8 tiles, parts full": ("1x512x3x128x128", Config("ring", 4, 8, resident=16)),
    "ring, 4 warps, 12 tiles, parts full": ("1x512x9x128x128", Config("ring", 4, 12, resident=12)),
    "ring, 8 warps, 7 tiles": ("1x256x17x256x256", Config("ring", 8, 7, resident=16, stages=4, ahead=3)),
}


def code(kernel: str) -> str:
    """The line of the table under "What the machine code says"."""
    size, config = CODE[kernel]
    shape = [int(number) for number in size.split("x")]
    x, weight = (torch.empty(one, dtype=torch.float16, device="meta") for one in (shape, shape[1]))
    with TUNED.forced(config):
        launch = plan(Call(x, weight, weight, 32, 1e-5)).launches[-1]
    cut = launch.constexprs["CUT"] if isinstance(launch, Launch) else launch.config
    assert f" {cut.tiles} tiles" in kernel
    found = sass.contents(launch.compile("sm_90a").cubin)
    return f"| {kernel} | {size} | {found.code.instructions} | {found.registers} | {found.local_bytes} |"


@pytest.mark.skipif(find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")
@pytest.mark.parametrize("kernel", CODE)
def test_machine_code(kernel):
    text = (DOCS / "dispatch.md").read_text()
    versions = f"Triton {triton.__version__}, cutlass-dsl {version('nvidia-cutlass-dsl')}"
    if f"({versions})" not in text:
        pytest.skip(f"dispatch.md counts the code of other compilers than {versions}")
    assert code(kernel) in text.splitlines()
