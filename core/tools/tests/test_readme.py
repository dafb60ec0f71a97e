"""README and docs/commands.md: short enough, answering first what a stranger asks, and naming commands that exist."""

import re
import shlex
from collections.abc import Iterator

import pytest
from typer.main import get_command

from kda_judge.contract.tasks import checkout_root, find_tasks
from kda_judge.evidence.run_record import Verdict
from kda_tools import cli

WORDS, SHOWN_WORDS = 800, 1200
"""Most words of the README that are written by hand, and that it shows before a reader unfolds anything."""
SCREEN = 60
"""Most lines above the second command: it follows the picture of models' steps and the reasons to trust it."""
QUESTIONS = ("## Is my model faster?", "## Can I trust it?", "## What do I type?")
COMING: set[str] = set()
"""Commands that the README announces and that are not there yet."""


def text_of(name: str) -> str:
    root = checkout_root()
    assert root is not None
    return (root / name).read_text(encoding="utf-8")


def commands(app: object, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    """Every command and group below `app`, with its words."""
    for name, command in getattr(app, "commands", {}).items():
        yield (*before, name), command
        yield from commands(command, (*before, name))


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, ...], object]:
    return dict(commands(get_command(cli.base.app)))


def quoted(text: str) -> list[list[str]]:
    """The words behind `kda` wherever a document shows a call of it."""
    blocks = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()] + re.findall(r"`(kda [^`]+)`", text)
    calls = (line.partition("&& ")[2] if "&& kda " in line else line for line in lines)
    return [shlex.split(call, comments=True)[1:] for call in calls if call.startswith("kda ")]


def test_the_readme_is_short_and_answers_three_questions_first() -> None:
    text = text_of("README.md")
    by_hand = re.sub(r"<!-- kda:(\S+):begin -->.*?<!-- kda:\1:end -->", "", text, flags=re.DOTALL)
    assert len(by_hand.split()) < WORDS
    unfolded = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
    assert len(unfolded.split()) < SHOWN_WORDS
    shown = unfolded.splitlines()
    places = [shown.index(question) for question in QUESTIONS]
    assert places == sorted(places)
    assert places[-1] + 8 < SCREEN, "the commands, too"
    first, trust, commands_ = (shown[start:stop] for start, stop in zip(places, [*places[1:], None], strict=True))
    assert any("speedups.svg" in line for line in first)
    assert any("docs/method.md" in line for line in trust)
    assert any(line.startswith("python3 -m venv") for line in commands_)


@pytest.mark.parametrize("name", ["README.md", "docs/commands.md", "docs/tutorial.md"])
def test_every_command_that_is_shown_exists_with_its_options(name: str, known: dict[tuple[str, ...], object]) -> None:
    ops = {task.op for task in find_tasks()} | {"OP", "[OP]", "RECORD", "A", "VERSION"}
    shown = quoted(text_of(name))
    assert shown
    for words in shown:
        if words[0] in COMING or words[0].isupper():
            continue
        path = next((tuple(words[:count]) for count in (2, 1) if tuple(words[:count]) in known), None)
        assert path is not None, words
        options = {option for one in known[path].params for option in one.opts}  # type: ignore[attr-defined]
        ours = words[: words.index("--")] if "--" in words else words
        assert {word for word in ours if word.startswith("--")} <= options, words
        if "task" in {one.name for one in known[path].params} and len(ours) > len(path):  # type: ignore[attr-defined]
            assert ours[len(path)] in ops, words


def test_every_command_is_listed(known: dict[tuple[str, ...], object]) -> None:
    listed = text_of("docs/commands.md")
    leaves = [words for words, command in known.items() if not hasattr(command, "commands")]
    assert [words for words in leaves if f"`kda {' '.join(words)}" not in listed] == []


def headings(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", one) for one in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", one.lower()).strip().replace(" ", "-") for one in plain}


def test_every_link_between_documents_leads_to_a_file_and_a_heading() -> None:
    root = checkout_root()
    assert root is not None
    folders = ("", ".github", "docs", "docs/skills", "diffusion", "diffusion/models", "llm")
    places = {one for folder in folders for pattern in ("*.md", "*/*.md") for one in (root / folder).glob(pattern)}
    places |= {one for task in find_tasks() for one in task.path.rglob("*.md")}
    fenced = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    prose = {one: fenced.sub("", one.read_text(encoding="utf-8")) for one in places}
    dead = []
    for place, text in prose.items():
        for link in re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
            path, _, anchor = link.partition("#")
            target = (place.parent / path).resolve() if path else place
            known = target.exists() and (not anchor or target not in prose or anchor in headings(prose[target]))
            dead += [] if known else [f"{place.relative_to(root)}: {link}"]
    assert len(prose) > 50
    assert dead == []


def test_the_glossary_explains_every_verdict_and_arm() -> None:
    text = text_of("docs/glossary.md")
    listed = re.findall(r"^\| `([A-Z_]+)` \|", text, re.MULTILINE)
    assert sorted(listed) == sorted(verdict.value for verdict in Verdict)
    for word in ("Row", "Arm", "Device", "Wall", "Portable wall", "Attained", "Generation", "Stale"):
        assert f"**{word}**" in text
