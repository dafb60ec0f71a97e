"""The tables of docs/dispatch.md follow from the recorded sweeps, docs/tuning.jsonl."""

import json
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
ROWS = ("hunyuanvideo-vae-1x512x9x128x40", "hunyuanvideo-vae-1x512x9x128x128")
FORMS = {
    "2026-11-20T20:18:38Z": "one part is in its registers",
    "2026-11-20T20:27:01Z": "it loads its next part",
    "2026-11-20T20:30:51Z": "the next part is loaded and published",
    "2026-11-20T20:39:50Z": "the part after next is loaded during the stores",
    "2026-11-20T23:25:48Z": "parts come by asynchronous copies",
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
    """The line that the table under "Tried in vain" has for a sweep."""
    sweep = Sweep(utc)
    cells = [", ".join(sweep.best(row, method) for method in ("hold", "flow")) for row in ROWS]
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
