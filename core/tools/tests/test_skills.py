"""Skills, AGENTS.md and the search over them: front matter, links, commands, numbers with the page they come from."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task, find_tasks
from kda_tools.cli.base import app
from kda_tools.knowledge import external
from kda_tools.knowledge.passages import search
from kda_tools.knowledge.ranking import Passage, rank
from kda_tools.publish.profile_page import ISSUING, STALLS, digest_md
from kda_tools.publish.task_notes import LINK, QUOTED

ROOT = Path(__file__).resolve().parents[3]
SKILLS = sorted((ROOT / "docs" / "skills").glob("*/SKILL.md"))
PAGES = [*sorted((ROOT / "docs" / "skills").rglob("*.md")), ROOT / "AGENTS.md", ROOT / "CLAUDE.md"]
NEEDS = "# needs: "
"""Behind a command that a test cannot run: what it needs."""
MEASURED = re.compile(r"\b\d[\d.,]*\s?(us|µs|ms|TB/s|GB/s|TFLOP/s|dB)\b|\b\d[\d.]*(x faster|% faster)")
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def blocks(page: Path, kind: str = "sh") -> Iterator[str]:
    """Lines of the page's fenced commands."""
    for body in re.findall(rf"^ *```{kind}\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL):
        yield from (line.strip() for line in body.splitlines() if line.strip())


def known(words: list[str]) -> bool:
    """Whether `kda WORDS` is a command, its options included."""
    group: Any = typer.main.get_command(app)
    for place, word in enumerate(words):
        if not hasattr(group, "commands"):
            options = {one for parameter in group.params for one in (*parameter.opts, *parameter.secondary_opts)}
            given = [one.partition("=")[0] for one in words[place:] if one.startswith("-") and one != "--"]
            return "--" in words or set(given) <= options | {"--help"}
        if word not in group.commands:
            return False
        group = group.commands[word]
    return True


@pytest.mark.parametrize("page", SKILLS, ids=lambda page: page.parent.name)
def test_front_matter(page: Path) -> None:
    text = page.read_text()
    match = re.match(r"---\nname: ([a-z0-9-]{1,64})\ndescription: (.+)\n---\n\n# \S", text)
    assert match, "expected name and description between two lines of ---, then the title"
    assert match[1] == page.parent.name
    assert ": " not in match[2], "no YAML: agents would not load it"
    assert 40 <= len(match[2]) <= 1024
    assert len(text.split()) < 900, "a skill is short: move details to references/"


def test_the_skills_that_the_index_promises_are_there() -> None:
    named = {
        *("diffusion-kernel", "add-triton-kernel", "add-cute-kernel", "add-cuda-kernel", "benchmark-and-profile"),
        *("optimize-kernel-loop", "use-efficient-kernels", "llm-kernel-campaign", "nsight"),
    }
    assert {page.parent.name for page in SKILLS} == named
    for page in (ROOT / "AGENTS.md", ROOT / "docs" / "skills" / "diffusion-kernel" / "SKILL.md"):
        others = named - {page.parent.name}
        assert all(f"{name}/SKILL.md" in page.read_text() for name in others), page
    assert "AGENTS.md" in (ROOT / "CLAUDE.md").read_text()


@EVERY_PAGE
def test_links_resolve(page: Path) -> None:
    for match in LINK.finditer(re.sub(r"`[^`\n]*`", "", page.read_text())):
        if re.match(r"\w+://", match["target"]):
            continue
        target = page.parent / match["target"]
        assert target.exists(), match[0]
        if match["anchor"]:
            titles = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
            assert match["anchor"][1:] in slugs, match[0]


@EVERY_PAGE
def test_every_command_exists(page: Path) -> None:
    text = page.read_text()
    lines = [line.partition(NEEDS)[0] for line in blocks(page)]
    lines += re.findall(r"^    (kda .+?)(?:  +#.*)?$", text, re.MULTILINE)
    lines += re.findall(r"`(kda [a-z][^`]*)`", text)
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[0] == "kda":
            # Words in capitals and dots stand for what the reader puts there.
            assert known([word for word in words[1:] if word != "..."]), line


@pytest.mark.parametrize("page", [page for page in PAGES if list(blocks(page))], ids=lambda page: page.parent.name)
def test_commands_without_a_need_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for line in blocks(page):
        if NEEDS in line:
            assert line.partition(NEEDS)[2].strip(), line
            continue
        words = shlex.split(line)
        assert words[0] == "kda", f"{line}: mark what it needs behind {NEEDS!r}"
        if "--template" in words:
            continue  # test_templates.py makes every one of them
        done = CliRunner().invoke(app, words[1:], catch_exceptions=False)
        assert done.exit_code == 0, (line, done.output)
        assert done.output


@EVERY_PAGE
def test_a_measured_number_names_its_page_or_run(page: Path) -> None:
    records = "".join(path.read_text() for task in find_tasks() for path in sorted(task.path.glob("docs/*.jsonl")))
    # What is generated from a record names the record in a line of its own.
    typed = re.sub(r"```.*?```|<!-- kda:\w+:begin -->.*?<!-- kda:\w+:end -->", "", page.read_text(), flags=re.DOTALL)
    for paragraph in re.split(r"\n\n|\n(?=[-|*\d])", typed):
        if MEASURED.search(paragraph):
            runs = QUOTED.findall(paragraph)
            assert LINK.search(paragraph) or runs, paragraph
            assert all(run in records for run in runs), paragraph


def test_every_stall_that_a_digest_prints_is_explained() -> None:
    table = (ROOT / "docs" / "skills" / "nsight" / "SKILL.md").read_text()
    named = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert named == {*STALLS, ISSUING}


def test_the_pages_that_a_stall_names_have_it_among_the_top_three() -> None:
    table = (ROOT / "docs" / "skills" / "nsight" / "SKILL.md").read_text()
    for reason, rest in re.findall(r"^\| `(\w+)` \|(.+)$", table, re.MULTILINE):
        for target in re.findall(r"\]\((\S+?profile\.md)\)", rest):
            page = (ROOT / "docs" / "skills" / "nsight" / target).resolve()
            tables = digest_md(Task(page.parents[1]), whole=True) or ""
            shown = re.findall(r"^\| top stalls +\|(.+)$", tables, re.MULTILINE)
            assert any(reason in line for line in shown), (reason, target)


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        ("register spills", "docs/skills/diffusion-kernel/references/troubleshooting.md"),
        ("stall long_scoreboard", "docs/skills/nsight/SKILL.md"),
        ("rope pitfalls interleaved", "docs/skills/use-efficient-kernels/SKILL.md"),
        ("persistent programs token's heads", "diffusion/k03_qknorm_rope/docs/tried.md"),
    ],
)
def test_knowledge_finds_the_passage(terms: str, expected: str) -> None:
    found = search(ROOT, terms, 6)
    assert expected in [hit.passage.place for hit in found]
    for hit in found:
        lines = (ROOT / hit.passage.place).read_text().splitlines()
        assert hit.passage.title.rpartition(" > ")[2] in lines[hit.passage.line - 1]


def test_knowledge_says_when_it_finds_nothing() -> None:
    with pytest.raises(UsageError, match="no skill, guide or note has any of these words"):
        search(ROOT, "zyzzyva", 3)
    with pytest.raises(UsageError, match="expected at least one word"):
        search(ROOT, "-- !", 3)


def test_external_collections_are_named_and_optional(tmp_path: Path) -> None:
    found = external.externals(ROOT)
    readme = (ROOT / "external" / "README.md").read_text()
    assert [one.path for one in found] == ["external/KernelWiki", "external/warp-specialization-report-skill"]
    for one in found:
        assert one.url.startswith("https://github.com/")
        assert one.url.removesuffix(".git") in readme
        assert one.command == f"git submodule update --init {one.path}"
    assert external.externals(tmp_path) == []
    shutil.copy(ROOT / ".gitmodules", tmp_path)
    page = tmp_path / "external" / "KernelWiki" / "wiki" / "page.md"
    page.parent.mkdir(parents=True)
    page.write_text("# Clusters\n\ndistributed shared memory\n")
    assert [one.present for one in external.externals(tmp_path)] == [True, False]
    assert search(tmp_path, "distributed shared", 3)[0].passage.place == "external/KernelWiki/wiki/page.md"
    (tmp_path / ".gitmodules").write_text("path = external/KernelWiki\n")
    with pytest.raises(UsageError, match=r"\.gitmodules: expected git's list of submodules"):
        external.externals(tmp_path)


def test_the_words_of_a_passage_are_shown_as_they_stand_there() -> None:
    text = "before " * 40 + "the variable KDA_ROOT, then fused_qknorm_rope of group_norm_silu" + " after" * 40
    (hit,) = rank([Passage("a.md", 1, "title", text)], "qknorm", 1)
    assert "KDA_ROOT, then fused_qknorm_rope of group_norm_silu" in hit.snippet
    assert len(hit.snippet.split()) <= 16
    (titled,) = rank([Passage("a.md", 1, "the title", text)], "title", 1)
    assert titled.snippet == "the title"
