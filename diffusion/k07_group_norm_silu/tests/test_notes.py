"""The numbers of docs/dispatch.md that are of recorded sweeps follow from docs/tuning.jsonl."""

import json
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
ROWS = ("hunyuanvideo-vae-1x512x9x128x40", "hunyuanvideo-vae-1x512x9x128x128")
FORMS = {
    "2026-11-20T20:18:38Z": "a part at a time",
    "2026-11-20T20:27:01Z": "the next part is loaded while this one waits, and said behind it",
    "2026-11-20T20:30:51Z": "the next part is loaded and said, then this one waits",
    "2026-11-20T20:39:50Z": "the part behind the next is loaded where this one is written, tile by tile",
}


def told(utc: str, form: str) -> str:
    """The line that the table under "Tried and left" has for a sweep."""
    (sweep,) = (s for s in map(json.loads, (DOCS / "tuning.jsonl").read_text().splitlines()) if s["utc"] == utc)
    (table,) = sweep["tables"]
    rows = {row["row"]: row for row in table["rows"]}

    def best(row: str, method: str) -> float:
        timed = zip(table["candidates"], rows[row]["median_us"], strict=True)
        return min(us for config, us in timed if us is not None and config["method"] == method)

    cells = [
        f"{best(row, 'hold'):.1f}, {best(row, 'flow'):.1f}, {best(row, 'stretch'):.1f}, {rows[row]['copy_us']:.1f}"
        for row in ROWS
    ]
    return f"| {form} | {utc}, `{sweep['commit'][:10]}` | {' | '.join(cells)} |"


@pytest.mark.parametrize("utc", FORMS)
def test_forms_that_were_tried(utc):
    assert told(utc, FORMS[utc]) in (DOCS / "dispatch.md").read_text().splitlines()
