"""All tasks have one form: the same files, headings and tables in the same order."""

import re
from inspect import signature

import pytest

from core.tools.tests.every_task import TASKS, every_task
from kda_tools.publish.task_notes import HOW_TO_WORK

FILES = (
    *("__init__.py", "prompt.md", "config.toml", "pyproject.toml", "hatch_build.py"),
    *("baseline/__init__.py", "baseline/primary.py", "baseline/eager.py", "solution/__init__.py"),
    *("bench/workloads.toml", "bench/reference.py", "bench/grid.py"),
    *("docs/dispatch.md", "docs/results.md", "docs/baseline_source.md"),
    *("tests/__init__.py", "tests/cases.py", "tests/test_kernel.py", "tests/test_op.py"),
)
TOGETHER = (("bench/tune.py", "solution/tuned.toml"), ("lab", "tests/test_lab.py"))
"""Both or neither."""
FOLDERS = {"baseline", "bench", "docs", "lab", "solution", "tests"}
CARD = ["The maths", "The shapes", "The envelope", "Out of scope", "What is special"]
"""The last one only where something is."""
DISPATCH = [
    "Paths",
    "The kernels?",
    "Techniques",
    "Configurations",
    "What bounds it",
    "Tried in vain",
    (OPTIONAL := "Not adopted yet"),
    "The plain path",
    "Beside upstream",
]
PAGES = 1350
"""Words of notes on dispatch, two pages with their tables: what else there was to say is in the history."""
TABLES = ["task", "ops", "upstream", "arms", "tolerance", "targets", "bench", "cpu"]
ARMS = ["baseline", "upstream_latest", "solution", "", "eager", "compile"]
"""A task's own arms stand in the gap."""


def headings(text):
    return re.findall(r"^## (.*)$", text, re.MULTILINE)


def assert_in_order(found, patterns):
    """Every one of `found` matches a pattern, none of an earlier one than the one before it."""
    places = [next((i for i, pattern in enumerate(patterns) if re.fullmatch(pattern, name)), name) for name in found]
    assert places == sorted(places, key=lambda place: (isinstance(place, str), place)), found
    assert not [place for place in places if isinstance(place, str)], found


@every_task
def test_files(task):
    assert [name for name in FILES if not (task.path / name).exists()] == []
    for one, other in TOGETHER:
        assert (task.path / one).exists() == (task.path / other).exists(), (one, other)
    assert ("upstream_latest" in task.config.arms) == (task.path / "baseline" / "latest.py").exists()
    assert {path.name for path in task.path.iterdir() if path.is_dir()} - {"__pycache__"} <= FOLDERS


@every_task
def test_card(task):
    text = (task.path / "prompt.md").read_text()
    assert text.splitlines()[0].lower() == f"# {task.op}: {task.config.task.title}".lower()
    assert headings(text) in (CARD[:-1], CARD)
    assert HOW_TO_WORK in text.partition("\n## ")[0]


@every_task
def test_card_counts_what_the_judge_counts(task):
    """The device decides; a card that quotes a target on the H200 quotes the contract's."""
    section = (task.path / "prompt.md").read_text().partition("## What is special\n")[2]
    assert "wall speedup above 1" not in section
    goal = task.config.targets["h200"]
    words = " ".join(section.split())
    assert {float(number) for number in re.findall(r"(?:within|at most) ([\d.]+) us", words)} <= {goal.within_us}
    assert {float(number) for number in re.findall(r"(0\.\d+) of ", words)} <= {goal.attained}
    above = {float(number) for number in re.findall(r"([\d.]+) us above", words)}
    assert above <= {goal.within_us, *goal.ops_within_us.values()}
    times = {float(number) for number in re.findall(r"at least ([\d.]+) times as fast", words)}
    assert times == set(goal.times_as_fast.values())


def test_how_to_work_names_sessions_that_there_are():
    """The page of all cards; the sessions are made from the tasks' names by the noxfile."""
    page = (TASKS[0].path.parents[1] / HOW_TO_WORK).read_text()
    made = set(re.findall(r'kda_session\(f"([a-z]+)-\{', (TASKS[0].path.parents[1] / "noxfile.py").read_text()))
    named = set(re.findall(r"nox -s ([a-z]+)-OP", page))
    assert named >= {"bench", "compile", "validate", "sanitize"}
    assert named <= made, made
    for words in ("TRITON_INTERPRET=1 nox -s tests -- TASK/tests/test_kernel.py", "-k 'OP or take_a_kernel'"):
        assert words in page


@every_task
def test_notes_on_dispatch(task):
    text = (task.path / "docs" / "dispatch.md").read_text()
    assert text.startswith("# Which call takes which path, and why\n")
    found = headings(text)
    assert len(found) - (OPTIONAL in found) == len(DISPATCH) - 1
    assert_in_order(found, DISPATCH)
    assert sum(word != "|" for word in text.split()) <= PAGES
    head, _, *rows = text.partition("## Techniques\n\n")[2].partition("\n\n")[0].splitlines()
    assert head == "| technique | where | guided by |"
    assert rows
    assert all(re.fullmatch(r"\| [^|]+ \| \[[^|]+\]\([^|]+\) \| [^|]+ \|", row) for row in rows), rows


@every_task
def test_contract(task):
    tables = re.findall(r"^\[([^\[\]]+)\]$", (task.path / "config.toml").read_text(), re.MULTILINE)
    assert_in_order([table.split(".")[0] for table in tables], TABLES)
    arms = [table.removeprefix("arms.") for table in tables if table.startswith("arms.")]
    assert_in_order([arm if arm in ARMS else "" for arm in arms], ARMS)


def test_packages():
    """Equal but for what names the task."""
    assert len({(task.path / "hatch_build.py").read_text() for task in TASKS}) == 1
    texts = []
    for task in TASKS:
        text = (task.path / "pyproject.toml").read_text()
        text = text.replace(f'"kda-{task.op.replace("_", "-")}"', "NAME")
        texts.append(re.sub(r"^description = .*$", "DESCRIPTION", text, flags=re.MULTILINE))
    assert texts == texts[:1] * len(TASKS)


@every_task
def test_solution(task):
    solution = task.load("solution")
    assert {*task.config.ops, "launches", "why_not"} <= set(solution.__all__)
    assert list(signature(solution.launches).parameters) == ["op", "inputs", "scalars"]
    assert next(iter(signature(solution.why_not).parameters)) == "op"
    assert all(hasattr(getattr(solution, op), "kda_op") for op in task.config.ops)


@pytest.mark.parametrize(
    ("found", "fits"),
    [(["a", "c"], True), (["a", "a", "b"], True), (["b", "a"], False), (["a", "x"], False), (["x", "a"], False)],
)
def test_the_order_is_told(found, fits):
    if fits:
        assert_in_order(found, ["a", "b", "c"])
    else:
        with pytest.raises(AssertionError):
            assert_in_order(found, ["a", "b", "c"])
