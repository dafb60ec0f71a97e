"""One field of a real line is changed: it is refused, nothing published changes, or docs/method_evidence.md says so."""

import copy
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_judge.contract.errors import KdaError, LedgerError
from kda_judge.contract.tasks import Task, find_task
from kda_judge.evidence import claims, ledger, ledger_migrations, provenance, stats
from kda_judge.evidence.derive import recompute
from kda_judge.evidence.run_record import RunRecord
from kda_tools.lab.grid import grid_record
from kda_tools.publish import (
    grid_page,
    plots,
    profile_page,
    report,
    results_page,
    sanitize_page,
    staleness,
    tables,
    task_claims,
)
from kda_tools.publish.generate import publish
from kda_tools.publish.site import overview_pages, row_pages, task_page
from kda_tools.publish.task_notes import foreign_records

ROOT = Path(__file__).resolve().parents[3]
HEADING = "## What a forged line can still say"
KINDS = ("ledger", "ledger of older files", "ledger v1", "grid", "sanitize", "profile")
DERIVED = (
    *("headline*", "noise_floor.*.ratio*", "rows.*.arms.*.summary*", "rows.*.speedup*", "rows.*.attained*"),
    *("rows.*.verdict", "rows.*.reason", "rows.*.limit.*", "rows.*.op", "rows.*.production", "rows.*.input_shapes*"),
    *("rows.*.arms.*.samples*", "noise_floor.*.*", "run_id", "utc", "task", "machine.kind"),
)
"""Fields of a ledger's line that follow from others, or from the task: none of them may be forged."""
Place = tuple[str | int, ...]
hit: dict[str, set[str]] = {}
"""Kind -> listed fields that could be forged."""


LAST_OF_VERSION_2 = 7
"""Line of k04's ledger: later ones have the columns of today, which `cut` adds."""


def line_of(op: str, log: str, number: int) -> dict[str, Any]:
    path = find_task(op).path / "docs" / f"{log}.jsonl"
    return json.loads(path.read_text().splitlines()[number])


def cut(line: dict[str, Any], new: bool) -> dict[str, Any]:
    """A run of the first row alone, which takes a tenth of the time; `new` in the form of today, with all columns."""
    rows = line["rows"][:1]
    floor = {name: part for name, part in line["noise_floor"].items() if name == rows[0]["id"]}
    data = ledger_migrations.migrate({**line, "rows": rows, "noise_floor": floor})
    if new:
        data["settings"] |= {"decides": "device", "cold": True, "beside": ["portable"]}
        arms = data["rows"][0]["arms"]
        port = {**arms["solution"], "samples": {"wall": arms["solution"]["samples"]["wall"]}, "summary": {}}
        arms["portable"] = port
        for name in ("baseline", "solution"):
            arms[name]["samples"]["cold"] = arms[name]["samples"]["device"]
        outputs = arms["baseline"]["correctness"]["outputs"]
        arms["baseline"]["distance"] = [
            {"output": one["output"], "equal": 0.75, "near": 0.9, "ulps": 2} for one in outputs
        ]
        walls = next(iter(floor.values()))
        beside = {"first": walls["first"], "second": walls["second"], "ratio": None}
        data["shared_host"] = {"neighbours": 3, "rows": {"a row": {"alone": beside, "beside": beside}}}
    made = recompute(RunRecord.model_validate_json(json.dumps(data))).model_dump(mode="json")
    return made if new else as_it_was(made, line)


def as_it_was(made: dict[str, Any], line: dict[str, Any]) -> dict[str, Any]:
    """What was computed, in the form of an older line."""
    old = {key: made[key] for key in line} | {"schema_version": line["schema_version"]}
    old["settings"] = {key: made["settings"][key] for key in line["settings"]}
    means = made["headline"]
    old["headline"] = {
        "rows": means["rows"],
        "speedup": means["speedup"]["wall"],
        "speedup_device": means["speedup"]["device"],
        "attained": line["headline"]["attained"],
        "attained_device": means["attained"],
    }
    old["rows"] = [
        {
            **{key: row[key] for key in before if key in row},
            "speedup": row["speedup"]["wall"],
            "attained": before["attained"],
            "attained_device": row["attained"],
            "arms": {name: {key: arm[key] for key in before["arms"][name]} for name, arm in row["arms"].items()},
        }
        for row, before in zip(made["rows"], line["rows"], strict=False)
    ]
    return old


LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "ledger": ("norm_tanh_mul_add", line_of("norm_tanh_mul_add", "ledger", LAST_OF_VERSION_2)),
    "ledger of older files": ("norm_tanh_mul_add", line_of("norm_tanh_mul_add", "ledger", LAST_OF_VERSION_2)),
    "ledger v1": ("qknorm_rope", line_of("qknorm_rope", "ledger", 0)),
    "grid": ("group_norm_silu", line_of("group_norm_silu", "grid", 0)),
    "sanitize": ("group_norm_silu", line_of("group_norm_silu", "sanitize", 0)),
    "profile": ("group_norm_silu", line_of("group_norm_silu", "profile", 0)),
}


def listed(kind: str) -> list[str]:
    """The fields that docs/method_evidence.md lists for this kind of line."""
    text = (ROOT / "docs" / "method_evidence.md").read_text()
    section = text.partition(HEADING)[2].partition("\n## ")[0]
    found = re.findall(r"^\| ([^|]+) \| (`[^|]+`) \| [^|]+ \|$", section, re.MULTILINE)
    return [
        field
        for kinds, fields in found
        if kind.partition(" ")[0] in kinds.split(", ")
        for field in re.findall("`(.+?)`", fields)
    ]


# ---- what is published of a line ----------------------------------------------------------------


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """What costs seconds and does not depend on the mutated field is computed once."""
    digests = lru_cache(provenance.hashes)
    monkeypatch.setattr(provenance, "hashes", digests)
    for module in (task_claims, staleness):
        monkeypatch.setattr(module, "hashes", digests)
    monkeypatch.setattr(task_claims, "facts_of", lru_cache(task_claims.facts_of))
    geomean, summarise = lru_cache(maxsize=None)(stats.geomean), lru_cache(maxsize=None)(stats.summarise)
    monkeypatch.setattr(stats, "geomean", lambda rows: geomean(tuples(rows)))
    monkeypatch.setattr(stats, "summarise", lambda samples: summarise(tuples(samples)))
    sound: list[RunRecord] = []

    def recomputed(record: RunRecord) -> RunRecord:
        """The record itself where what its numbers follow from, and they, are those of one that was found sound."""
        for one in sound:
            same = (record.rows, record.noise_floor, record.settings) == (one.rows, one.noise_floor, one.settings)
            if same and (record.headline, record.machine.kind) == (one.headline, one.machine.kind):
                return record
        if not sound:
            sound.append(record)  # the first one is the line as it was
        return recompute(record)

    monkeypatch.setattr(claims, "recompute", recomputed)
    monkeypatch.setattr(row_pages, "strips", lambda *_: None)  # drawn of samples alone


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Task]:
    """The task of a line without its records."""

    def copy_of(kind: str) -> Task:
        source = find_task(LINES[kind][0]).path
        folder = tmp_path / source.parent.name / source.name
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.jsonl", "*.md", "__pycache__", "plots"))
        (folder / "docs").mkdir(exist_ok=True)
        if kind.startswith("ledger"):
            rows = folder / "bench" / "workloads.toml"
            rows.write_text("[[workload]]".join(rows.read_text().split("[[workload]]")[:2]))
        return Task(folder)

    return copy_of


def tuples(value: Any) -> Any:
    return tuple(map(tuples, value)) if isinstance(value, list | tuple) else value


def published(task: Task, kind: str, data: dict[str, Any], draw: bool = False) -> str:
    """Everything that is published of a line; a KdaError that names file and line where it is refused."""
    if not kind.startswith("ledger"):
        log = task.path / "docs" / f"{kind}.jsonl"
        log.write_text(json.dumps(data) + "\n")
        if foreign := foreign_records(task):
            raise KdaError(foreign[0])
        page = {"grid": grid_page, "sanitize": sanitize_page, "profile": profile_page}[kind].digest_md(task, whole=True)
        if kind == "grid":
            assert grid_record.runs(task)
        return str(page)
    arriving = task.path / "arriving.jsonl"
    arriving.write_text(json.dumps(data) + "\n")
    task.ledger.unlink(missing_ok=True)
    ledger.merge(task.ledger, arriving, partial(task_claims.ledger_refusal, task))
    records = ledger.read(task.ledger)
    drawn = plots.plots(task, records) if draw else dict.fromkeys((plots.file_name(k, "h200") for k in plots.KINDS), "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "plots", lambda *_: drawn)
        site = [
            task_page.task_page(task, records),
            overview_pages.headlines([(task, report.published(task, records))], ""),
        ]
        rows = row_pages.row_pages(task, records, report.published(task, records))
    site += [html for _, html in rows.values()]
    pages = [results_page.results_md(task, records), tables.overview_md([(task, report.published(task, records))])]
    return "\n".join([*pages, *site, *drawn.values()])


# ---- mutations ----------------------------------------------------------------------------------


def places(data: Any, at: Place = ()) -> Iterator[Place]:
    """Every field, containers too."""
    if at:
        yield at
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield from places(data[key], (*at, key))


NAMED = {"arms", "rows", "speedup", "speedup_device", "hashes", "pins", "versions", "noise_floor", "input_shapes"} | {
    *("throttle_s", "opponents", "worst", "blocks_per_sm", "stalls", "samples", "summary", "clock_ratio")
}
"""Their keys are names of something, not of fields."""


def field(place: Place) -> str:
    """The place without positions and names: `rows.*.arms.*.samples.*`."""
    parts = ["*" if isinstance(part, int) or before in NAMED else part for before, part in pairwise((None, *place))]
    return ".".join(parts)


def value_at(data: Any, place: Place) -> Any:
    for key in place:
        data = data[key]
    return data


def with_value(data: Any, place: Place, value: Any) -> Any:
    """A copy, deep along the place alone."""
    new = copy.copy(data)
    if place[1:] or value is not GONE:
        new[place[0]] = with_value(data[place[0]], place[1:], value) if place[1:] else value
    else:
        del new[place[0]]
    return new


ENUMS = ("NOT_FASTER", "INCORRECT", "INVALID", "float32", "cpu")
GONE = object()
"""For a value: the key is left out."""


def specials(old: Any) -> list[Any]:
    """Values that are tried on every field of this type."""
    if isinstance(old, bool):
        return [not old, None]
    if isinstance(old, int | float):
        return [None, 0, -5, 123456, 10**30, old + 1, old * 1.01, math.nan, math.inf, 1e308]
    if isinstance(old, str):
        return ["", f"{old}x", re.sub(r"20\d\d", "2999", old), *ENUMS, "0" * 64]
    if isinstance(old, list):
        return [[], old[1:], [*old, *old[-1:]], old[::-1], [*old, "x"]]
    if isinstance(old, dict):
        return [{}, {**old, "x": 1}]
    return ["x", "20200101T000000Z-000000", 1, 0.5, [], {}]


def strategy(old: Any) -> st.SearchStrategy[Any]:
    if isinstance(old, bool) or not isinstance(old, int | float | str):
        return st.none() | st.integers() | st.text(max_size=3)
    near = st.integers() if isinstance(old, int) else st.floats(0.5, 2).map(lambda factor: old * factor)
    return st.text(max_size=5) if isinstance(old, str) else near | st.floats() | st.floats(0, 1)


def draw(values: st.SearchStrategy[Any], attempt: Callable[[Any], None]) -> None:
    """A few values of the strategy, the same ones in every run of the tests."""

    @settings(max_examples=2, derandomize=True, deadline=None, database=None)
    @given(values)
    def drawn(value: Any) -> None:
        attempt(value)

    drawn()


def every(several: list[Place], honest: dict[str, Any], attempt: Callable[[Place, Any], None]) -> None:
    """All mutations of a field that is in several places of a line."""
    for value in (GONE, *specials(value_at(honest, several[0]))):
        attempt(several[0], value)
    draw(strategy(value_at(honest, several[-1])), partial(attempt, several[-1]))


def differs(one: Any, two: Any) -> bool:
    return json.dumps(one) != json.dumps(two)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # a sample of 1e308 us
@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_field(kind: str, copied: Callable[[str], Task], capsys: pytest.CaptureFixture[str]) -> None:
    task, honest = copied(kind), copy.deepcopy(LINES[kind][1])
    today = provenance.hashes(task)
    honest["provenance"]["hashes"] = dict.fromkeys(today, "0" * 64) if kind == "ledger of older files" else today
    honest["provenance"]["dirty"] = False
    if kind.startswith("ledger"):
        honest = cut(honest, new=kind != "ledger v1")
    before = published(task, kind, honest)
    fields: dict[str, list[Place]] = {}
    for place in places(honest):
        fields.setdefault(field(place), []).append(place)
    tried, ends, free, forged = 0, Counter[str](), dict[Place, Any](), dict[str, tuple[Any, ...]]()
    wrong: list[str] = []

    def attempt(place: Place, value: Any) -> None:
        nonlocal tried
        if value is not GONE and not differs(value_at(honest, place), value):
            return
        tried += 1
        try:
            same = published(task, kind, with_value(honest, place, value)) == before
        except KdaError as error:
            ends["refused"] += 1
            if ".jsonl" not in str(error):
                wrong.append(f"{place}: {value!r}: names no file: {error}")
            return
        except Exception as error:  # noqa: BLE001  # a traceback is what this looks for
            wrong.append(f"{place}: {value!r}: {error!r}")
            return
        ends["unchanged" if same else "forged"] += 1
        if same:
            free[place] = value
        else:
            forged.setdefault(field(place), (place, value_at(honest, place), value))

    for several in fields.values():
        every(several, honest, attempt)
    with capsys.disabled():
        said = ", ".join(f"{count} {name}" for name, count in sorted(ends.items()))
        print(f"\n{kind}: {tried} mutations of {len(fields)} fields: {said}")
    assert wrong == []
    known = listed(kind)
    assert {name: what for name, what in forged.items() if not any(fnmatchcase(name, one) for one in known)} == {}
    hit[kind] = {one for one in known if any(fnmatchcase(name, one) for name in forged)}
    if kind in ("ledger", "ledger of older files"):
        assert [name for name in forged if any(fnmatchcase(name, one) for one in DERIVED)] == []
    if kind == "ledger":
        _no_plot_shows(free, honest, lambda data, draw: published(task, kind, data, draw))


def _no_plot_shows(free: dict[Place, Any], honest: Any, shown: Callable[[Any, bool], str]) -> None:
    """What changed no page, all at once as far as that is no contradiction, changes no plot either."""
    before, data = shown(honest, False), honest
    for place, value in free.items():
        with suppress(KdaError, LookupError, TypeError):
            if shown(changed := with_value(data, place, value), False) == before:
                data = changed
    assert differs(data, honest)
    if plots.missing() is None:
        assert shown(data, True) == shown(honest, True)


@pytest.mark.skipif(os.environ.get("PYTEST_XDIST_WORKER") is not None, reason="needs all kinds in one process")
def test_nothing_is_listed_in_vain() -> None:
    if set(hit) != set(KINDS):
        pytest.skip("a kind of line was left out")
    for kind in KINDS:
        alike = [one for one in KINDS if one.split()[0] == kind.split()[0]]
        assert set(listed(kind)) == set().union(*(hit[one] for one in alike))


FOUND = [
    ("rows.0.arms.solution.correctness.checks", 0),
    ("rows.0.arms.solution.correctness.outputs", []),
    ("rows.0.arms.solution.correctness.outputs.0.used", math.nan),
    ("rows.0.arms.solution.correctness.outputs.0.used", 123456),
    ("rows.0.arms.solution.correctness.outputs.0.max_abs", -5),
    ("utc", "2999-11-20T04:30:00Z"),
    ("machine.after.power_w", math.nan),
]
"""What once was merged, published and found valid."""


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(("name", "value"), FOUND)
def test_what_once_passed_is_refused(name: str, value: Any, copied: Callable[[str], Task]) -> None:
    task, place = copied("ledger"), tuple(int(part) if part.isdigit() else part for part in name.split("."))
    line = with_value(cut(LINES["ledger"][1], new=True), place, value)
    with pytest.raises(LedgerError) as refused:
        published(task, "ledger", line)
    assert str(refused.value).startswith(f"{task.path / 'arriving.jsonl'}:1: ")
    assert str(place[-1]) in str(refused.value)


def test_a_line_of_another_task_is_named(copied: Callable[[str], Task]) -> None:
    task, other = copied("ledger"), LINES["ledger v1"][1]
    lines = [LINES["ledger"][1], other]
    task.ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(LedgerError) as refused:
        publish([task], check=True, draw=False)
    said = (
        f"{task.ledger}:2: it is of qknorm_rope, expected of norm_tanh_mul_add as others in this file: remove the line"
    )
    assert str(refused.value) == said
