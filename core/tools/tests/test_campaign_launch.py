"""Launching: the scripts, the worktree, what is refused, the agents, the prompt and its budget."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from core.tools.tests.campaign_toy import campaign, git, launched, make_repository, speed
from core.tools.tests.every_task import TASKS, every_task
from kda_judge.contract.errors import ArmFailed, ExitCode, LedgerError, MissingRequirement, UsageError
from kda_judge.contract.task_import import import_path
from kda_judge.contract.tasks import Task, find_task
from kda_judge.evidence import ledger
from kda_tools.campaign import agents, bash, confine, iterate, launch, place, prompt
from kda_tools.campaign.events import Ended
from kda_tools.campaign.journal import entries
from kda_tools.campaign.passages import passages
from kda_tools.campaign.prompt import Section, compose, tokens
from kda_tools.project import launch_scripts
from kda_tools.project.check import Check

__all__ = ["campaign"]
ROOT = Path(__file__).resolve().parents[3]


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# ---- scripts ----------------------------------------------------------------------------------


def test_no_script_is_of_no_task() -> None:
    wanted = {path for task in TASKS for path in launch_scripts.expected_scripts(task)}
    assert {path for task in TASKS for path in (task.path.parent / launch_scripts.FOLDER).glob("*")} <= wanted


@every_task
def test_every_task_has_its_scripts(task: Task) -> None:
    assert launch_scripts.problems(task) == []
    for path, text in launch_scripts.expected_scripts(task).items():
        assert os.access(path, os.X_OK)
        target = path.name.split("_")[1]
        assert (path.parent / text.split('")/')[1].split('"')[0]).resolve() == ROOT / launch_scripts.LAUNCHER
        assert text.rstrip().endswith(f'{target} "$@"')


def test_scripts_are_good_bash() -> None:
    scripts = [*sorted(ROOT.glob("*/scripts/launch_kernels/*.sh")), ROOT / launch_scripts.LAUNCHER]
    assert len(scripts) > 1
    for script in scripts:
        checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr


def test_a_script_prepares_everything_and_starts_nothing(checkout: Path) -> None:
    task = make_repository(checkout)
    (checkout / "core" / "tools").mkdir(exist_ok=True)
    shutil.copy(ROOT / launch_scripts.LAUNCHER, checkout / launch_scripts.LAUNCHER)
    (script,) = launch_scripts.write(task)
    kda = checkout.with_name(f"{checkout.name}-bin") / "kda"
    program(kda, f'#!/bin/sh\nexec {sys.executable} -m kda_tools "$@"\n')
    git(checkout, "add", "-A")
    git(checkout, "commit", "-q", "-m", "scripts")
    trees = checkout.with_name(f"{checkout.name}-trees")
    env = {**os.environ, "PYTHONPATH": import_path(), "PATH": f"{kda.parent}:{os.environ['PATH']}"}
    env |= {"KDA_NO_CLAUDE": "1", "KDA_WORKTREES": str(trees), "HOME": str(checkout)}
    ran = subprocess.run([script], cwd="/", env=env, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "launched: campaign k90_h200_axpy" in ran.stdout
    assert "KDA_NO_CLAUDE is set: nothing was started. It would be:" in ran.stdout
    assert "claude -p" in ran.stdout
    written = (checkout / ".git" / "kda" / "campaigns" / "k90_h200_axpy.prompt.md").read_text()
    for part in ("# Your campaign", "# What this machine lacks", "The card.", "# Left out of this prompt"):
        assert part in written
    assert git(trees / "k90_h200_axpy", "symbolic-ref", "--short", "HEAD").strip() == "campaign/k90_h200_axpy/work"
    old = program(checkout.with_name("old-bash"), "#!/bin/sh\necho 3\n")
    named = {**env, "KDA_BASH_BIN": str(old)}
    refused = subprocess.run(
        [kda, "campaign", "launch", "axpy"], cwd=checkout, env=named, capture_output=True, text=True, check=False
    )
    assert refused.returncode == ExitCode.REQUIREMENT
    assert "expected Bash 4 or later, got version 3" in refused.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "#!/bin/sh\necho 3\n",
            "expected Bash 4 or later, got version 3; install a newer one .macOS: brew install bash.",
        ),
        ("#!/bin/sh\necho\n", "expected Bash 4 or later, got version unknown"),
        ("#!/bin/sh\nexit 1\n", "does not run as Bash"),
        (None, "not found or not executable"),
    ],
)
def test_an_old_bash_is_refused(
    text: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bash"
    if text:
        program(path, text)
    monkeypatch.setenv(bash.VARIABLE, str(path))
    with pytest.raises(MissingRequirement, match=expected):
        bash.demand_bash()


def test_the_bash_here_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(bash.VARIABLE, raising=False)
    assert Path(bash.demand_bash()).name == "bash"


# ---- the worktree -----------------------------------------------------------------------------


def test_a_dirty_tree_is_refused(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_repository(checkout)
    monkeypatch.setenv("KDA_NO_CLAUDE", "1")
    (checkout / "stray.py").write_text("")
    with pytest.raises(UsageError, match=r"1 changed or new files \(stray.py\): commit or remove them first"):
        launch.prepare(checkout, task, "h200", "claude")


@pytest.mark.parametrize(
    ("base", "target", "agent", "expected"),
    [
        ("mian", "h200", "claude", r"KDA_BASE_BRANCH=mian: no such branch; nearest: main"),
        ("main", "h100", "claude", r"--target 'h100': .* has no \[targets.h100\]; nearest: h200"),
        ("main", "h200", "cluade", r"--agent 'cluade': no such agent; nearest: claude"),
        ("main", "h200", "command", r"--command: expected TEXT, .* got none"),
    ],
)
def test_wrong_names_are_refused(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, base: str, target: str, agent: str, expected: str
) -> None:
    task = make_repository(checkout)
    monkeypatch.setenv("KDA_NO_CLAUDE", "1")
    monkeypatch.setenv(launch.BASE, base)
    monkeypatch.setattr(launch.doctor, "kernel_checks", lambda _: [])
    with pytest.raises(UsageError, match=expected):
        launch.prepare(checkout, task, target, agent)
    assert git(checkout, "branch", "--list", "campaign/*") == ""


def test_an_agent_that_is_not_installed_is_refused(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_repository(checkout)
    monkeypatch.delenv("KDA_NO_CLAUDE", raising=False)
    monkeypatch.setattr(agents.shutil, "which", lambda name, **_: None if name == "claude" else f"/bin/{name}")
    with pytest.raises(MissingRequirement, match=r"--agent claude: claude: not found on PATH"):
        launch.prepare(checkout, task, "h200", "claude")


def test_it_begins_from_the_base_branch_and_goes_on(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_repository(checkout)
    git(checkout, "branch", "older")
    git(checkout, "commit", "-q", "--allow-empty", "-m", "newer")
    monkeypatch.setenv("KDA_NO_CLAUDE", "1")
    monkeypatch.setenv(place.WORKTREES, str(checkout.with_name(f"{checkout.name}-trees")))
    monkeypatch.setenv(launch.BASE, "older")
    lacking = [Check("gpu", False, "busy: pid 7", "measuring", "wait")]
    monkeypatch.setattr(launch.doctor, "kernel_checks", lambda _: lacking)
    first = launch.prepare(checkout, task, "h200", "command", "true")
    state = first.campaign.state()
    assert not first.resumed
    assert state.launched.base == git(checkout, "rev-parse", "older").strip()
    assert state.launched.warnings == ("gpu: busy: pid 7",)
    assert "- gpu: busy: pid 7 (needed for measuring): wait" in first.process.prompt.read_text()
    shutil.rmtree(first.campaign.repository.root)  # a worktree that was deleted is made again
    again = launch.prepare(checkout, task, "h200", "command", "true")
    assert again.resumed
    assert len(again.campaign.journal.read()) == 1
    launch.prepare(checkout, task, "h200", "claude")
    launch.prepare(checkout, task, "h200", "claude")
    assert first.campaign.state().agents == ["command", "claude"], "another agent is recorded, once"
    with first.campaign.alone(), pytest.raises(UsageError, match="another command writes to it"):
        launch.prepare(checkout, task, "h200", "command", "true")
    monkeypatch.setenv(launch.BASE, "main")
    with pytest.raises(UsageError, match="KDA_BASE_BRANCH=main: campaign k90_h200_axpy began from older"):
        launch.prepare(checkout, task, "h200", "claude")


def test_another_campaign_begins_from_its_base_and_the_old_ones_record_is_kept(
    campaign: place.Campaign, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed(campaign, 1.1)
    first = iterate.iterate(campaign, "first")
    candidate, record = campaign.state().begun[first.iteration].commit, campaign.journal.content()
    monkeypatch.chdir(checkout)
    git(checkout, "worktree", "remove", "--force", str(campaign.repository.root))
    git(checkout, "branch", "-q", "-D", campaign.branch, campaign.best_branch)
    task = Task(checkout.resolve() / campaign.folder)
    again = launch.prepare(checkout.resolve(), task, "h200", "command", "true").campaign
    monkeypatch.chdir(again.repository.root)
    speed(again, 1.2)
    iterate.iterate(again, "second")
    assert git(checkout, "log", "--format=%s", f"main..{again.branch}").splitlines() == ["[iter 1] second"]
    (old,) = again.journal.path.parent.glob(f"{again.name}.*Z.jsonl")
    assert old.read_bytes() == record
    assert git(checkout, "rev-parse", f"refs/kda/{old.stem}/1").strip() == candidate


def test_a_campaign_goes_on_by_the_rules_of_its_launch(campaign: place.Campaign, checkout: Path) -> None:
    task = Task(checkout / "toys" / "k90_axpy")
    (task.path / "campaign.toml").write_text("trys = 3\n")
    git(checkout, "add", "-A")
    git(checkout, "commit", "-q", "-m", "wrong rules")
    assert launch.prepare(checkout.resolve(), task, "h200", "command", "true").resumed


def test_the_agent_gets_the_prompt_and_its_surroundings(campaign: place.Campaign, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    command = ["bash", "-c", f'cat > {seen}; pwd >> {seen}; echo "$KDA_BASH_BIN $KDA_CACHE" >> {seen}; exit 3']
    path = tmp_path / "prompt.md"
    path.write_text("the prompt\n")
    process = launch.Process(
        command, launch._environment(tmp_path, "/x/bash", path), campaign.repository.root, path, True
    )
    assert launch.start(process) == 3
    assert seen.read_text().splitlines() == ["the prompt", str(campaign.repository.root), f"/x/bash {tmp_path}"]


@pytest.mark.parametrize(("name", "content"), [("text", "no program"), ("bash", None)])
def test_an_agent_that_cannot_be_started_is_an_error(
    campaign: place.Campaign, tmp_path: Path, name: str, content: str | None
) -> None:
    """Neither a file that is no program, nor a prompt that is longer than an argument may be."""
    path = tmp_path / "prompt.md"
    path.write_text("")
    command = [str(program(tmp_path / name, content))] if content else ["bash", "-c", "true", "x" * 3_000_000]
    process = launch.Process(command, {}, tmp_path, path, True)
    with pytest.raises(ArmFailed, match=r"the agent could not be started: (Exec format error|Argument list too long)"):
        launch.start(process)


# ---- agents -----------------------------------------------------------------------------------


def test_agents_are_added_without_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "agents.toml"
    own.write_text('[agents.mine]\ncommand = ["mine", "--prompt", "{prompt}"]\nprompt = "file"\n')
    monkeypatch.setenv(agents.VARIABLE, str(own))
    assert {"claude", "codex", "command", "mine"} == set(agents.read_agents())
    words = {"prompt": "/p.md", "worktree": "/w", "git": "/g", "bash": "/b"}
    assert agents.started_by(agents.find_agent("mine"), words, "text") == ["mine", "--prompt", "/p.md"]
    argument = agents.Agent(command=("a", "-x"), prompt="argument")
    assert agents.started_by(argument, words, "text") == ["a", "-x", "text"]
    own.write_text('[agents.mine]\ncommand = ["mine"]\nprompt = "mail"\n')
    with pytest.raises(UsageError, match=r"key 'agents.mine.prompt'"):
        agents.read_agents()


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('command = ["{prompt.z}"]', "command"),
        ('command = ["{nobody}"]', "command"),
        ('command = ["{"]', "command"),
        ('command = ["a"]\nenvironment = {"A=B" = "x"}', "environment"),
        ('command = ["a"]\nwritable = ["~nouser/x"]', "writable"),
    ],
)
def test_an_agent_that_cannot_be_started_is_refused_by_file_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, key: str
) -> None:
    own = tmp_path / "agents.toml"
    own.write_text(f"[agents.mine]\n{line}\n")
    monkeypatch.setenv(agents.VARIABLE, str(own))
    with pytest.raises(UsageError, match=rf"^{own}: key 'agents.mine.{key}'"):
        agents.read_agents()
    monkeypatch.setenv(agents.VARIABLE, "~nouser/x")
    with pytest.raises(UsageError, match=r"KDA_AGENTS: expected a path, got '~nouser/x'"):
        agents.read_agents()


def test_a_journals_line_is_whole_or_not_there_and_has_a_date(
    campaign: place.Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, write, calls = campaign.journal, os.write, []
    before = journal.content()

    def full(file: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(file, data[:9])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        journal.append(Ended(reason="x"))
    assert journal.path.read_bytes() == before
    with pytest.raises(LedgerError, match="x:1: no event of a campaign: utc: "):
        entries(re.sub(rb'"utc":"[^"]*"', b'"utc":"yesterday"', before), "x")


def test_bwrap_leaves_only_the_campaign_writable(campaign: place.Campaign, checkout: Path) -> None:
    if not confine.can_confine():
        pytest.skip("bwrap is not installed here, or may not make namespaces")
    inside = campaign.task.path / "solution" / "new.py"
    main = checkout / "toys" / "k90_axpy" / "solution" / "__init__.py"
    hook, config = campaign.repository.common / "hooks" / "x", campaign.repository.common / "config"
    text = main.read_text()
    script = (
        f"touch {inside} && git commit -q --allow-empty -m mine || exit 9; "
        f"echo x >> {main}; echo x >> {config}; mkdir -p {hook.parent}; touch {hook}; "
        "git update-ref refs/heads/main HEAD; true"
    )
    before = git(checkout, "rev-parse", "main")
    env = {**os.environ, **{f"GIT_{who}_{what}": "t" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}}
    ran = subprocess.run(
        confine.confined(campaign.repository.root, confine.writable(campaign), ["bash", "-c", script], ()),
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert inside.is_file()
    assert (main.read_text(), git(checkout, "rev-parse", "main")) == (text, before)
    assert "x" not in config.read_text().splitlines()
    assert not hook.exists()


def test_a_confined_agent_can_ask_for_the_review(campaign: place.Campaign) -> None:
    """The prompt tells it to, at the end; the clean checkout of the review must need nothing that it may not write."""
    if not confine.can_confine():
        pytest.skip("bwrap is not installed here, or may not make namespaces")
    words = [sys.executable, "-m", "kda_tools", "campaign", "review"]
    env = {**os.environ, "PYTHONPATH": import_path(), **confine.environment(campaign)}
    env.pop("KDA_ROOT", None)
    command = confine.confined(campaign.repository.root, confine.writable(campaign), words, ())
    for folder in confine.environment(campaign).values():
        Path(folder).mkdir(parents=True, exist_ok=True)
    ran = subprocess.run(
        command, cwd=campaign.repository.root, env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert "findings about commit" in ran.stdout, ran.stderr
    assert [one.by for one in campaign.state().reviews] == ["program"]


# ---- the prompt -------------------------------------------------------------------------------


def test_what_does_not_fit_is_cut_or_named() -> None:
    long = "\n\n".join(f"Paragraph {number}. " + "word " * 40 for number in range(20))
    made = compose(
        [
            Section("First", "short", "here", must=True),
            Section("Second", long, "docs/second.md"),
            Section("Third", long, "docs/third.md"),
            Section("Fourth", "fits", "docs/fourth.md"),
        ],
        1000,
    )
    assert tokens(made) <= 1000
    assert "Paragraph 0." in made
    assert "Paragraph 19." not in made
    listed = made.partition("# Left out of this prompt (budget 1000 tokens)")[2]
    assert "- Second: cut, " in listed
    assert "- Third: left out; all of it: docs/third.md" in listed
    assert "Fourth" not in listed
    assert compose([Section("First", "short", "here", must=True)], 2000).endswith("Nothing.\n")


def test_a_prompt_of_a_real_task_is_whole(campaign: place.Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every section is there for a task with records, of which the budget is enough."""
    task = find_task(str(ROOT / "diffusion" / "k03_qknorm_rope"))
    real = place.Campaign(campaign.name, task, launch.Repository(ROOT))
    made = list(prompt.sections(real, campaign.state(), []))
    titles = [one.title for one in made]
    assert titles[:5] == [
        "Your campaign",
        "What this machine lacks",
        "The card: k03_qknorm_rope/prompt.md",
        "docs/work_on_a_task.md",
        "Where it stands",
    ]
    assert any(title.startswith("kda why qknorm_rope ") for title in titles)
    assert {"What a gain is worth in models", "What was tried before", "Notes: docs/dispatch.md"} <= set(titles)
    rest = next(one for one in made if one.title == "Further passages that fit, the best first")
    best = {one.title for one in made}
    for passage in passages(ROOT, task):
        named = f"{passage.place}: {passage.title.rpartition(' > ')[2]}"
        assert named in best or f"- {named}" in rest.text.splitlines()
    monkeypatch.setattr(prompt.why, "missing_rows", lambda _: [])
    rows = " ".join(f"{one.title} {one.text}" for one in prompt.sections(real, campaign.state(), []))
    assert all(row.id in rows for row in task.workloads if row.production), "rows without their own section are named"
    for budget in (3_000, 5_000, 8_000, 24_000):
        assert tokens(compose(made, budget)) <= budget
    whole = compose(made, 24_000)
    assert (task.path / "prompt.md").read_text().strip() in whole
    small = compose(made, 4_000)
    assert tokens(small) <= 4_000
    assert "Notes: docs/dispatch.md: " in small.partition("# Left out of this prompt")[2]


def test_passages_that_fit_the_kernel_come_first(tmp_path: Path) -> None:
    skills = tmp_path / "docs" / "skills" / "norms"
    skills.mkdir(parents=True)
    (skills / "SKILL.md").write_text(
        "# Rotary embedding\n\nRotary rope needs a norm.\n\n# Sorting\n\nNothing of it.\n\n"
        "# RMSNorm and rope of query and key\n\n"
        "Query, key, rmsnorm, rope, qknorm.\n"
    )
    task = find_task(str(ROOT / "diffusion" / "k03_qknorm_rope"))
    found = [(one.place, one.title) for one in passages(tmp_path, task)]
    assert found[0] == ("docs/skills/norms/SKILL.md", "RMSNorm and rope of query and key")
    assert not any("Sorting" in title for _, title in found)
    assert passages(tmp_path / "nowhere", task) == []


def test_rows_that_a_run_lacks_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    task = find_task(str(ROOT / "diffusion" / "k03_qknorm_rope"))
    production = [row.id for row in task.workloads if row.production]
    record = next(one for one in reversed(ledger.read(task.ledger)) if set(production) <= {row.id for row in one.rows})
    last = next(row for row in record.rows if row.id == production[-1])
    assert last.attained
    monkeypatch.setattr(prompt.ledger, "read", lambda _: [record.model_copy(update={"rows": (last,)})])
    assert prompt._slowest(task) == [production[-1], *production[:-1]]


def test_rules_name_the_key_that_is_wrong(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"^toys/k90_axpy/campaign.toml: unknown key 'trys'; did you mean tries\?"):
        launched(checkout, monkeypatch, "trys = 3\n")
    assert git(checkout, "branch", "--list", "campaign/*") == "", "a launch with good rules finds nothing in its way"


def test_rows_that_there_are_not_are_refused_before_the_rules_are_fixed(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"^toys/k90_axpy/campaign.toml: key 'rows': 'none-\*': no such row; nearest"):
        launched(checkout, monkeypatch, 'rows = ["none-*"]\n')


def test_few_generations_are_refused(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer, a campaign keeps what is no better more often than one in twenty."""
    with pytest.raises(UsageError, match=r"campaign.toml: key 'generations': .* equal to 5, got 4"):
        launched(checkout, monkeypatch, "generations = 4\n")
