"""Launch an agent on a task: a worktree and a branch of its own, a look at the machine, the prompt, and the start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kda_judge.arms.upstream import cache_folder
from kda_judge.contract.errors import ArmFailed, UsageError
from kda_judge.contract.near_names import nearest
from kda_judge.contract.tasks import Task
from kda_tools.campaign import agents, bash, confine, prompt
from kda_tools.campaign.allowed import protected_hashes
from kda_tools.campaign.events import Continued, Launched
from kda_tools.campaign.journal import Journal
from kda_tools.campaign.place import STATE_FOLDER, Campaign, branch_of, demand_target, name_of, worktree_of
from kda_tools.campaign.repository import Repository
from kda_tools.campaign.rules import Rules, read_rules
from kda_tools.project import doctor
from kda_tools.project.check import Check

BASE = "KDA_BASE_BRANCH"
PREPARE_ONLY = "KDA_NO_CLAUDE"
"""Set to anything but 0: everything is prepared, and no agent, of whatever name, is started."""


@dataclass(frozen=True)
class Process:
    """An agent's process, not yet started."""

    command: list[str]
    environment: dict[str, str]
    """What is added to this process's own."""
    where: Path
    """The folder that it starts in."""
    prompt: Path
    by_stdin: bool
    """Whether the agent gets the prompt on standard input."""


@dataclass(frozen=True)
class Prepared:
    """A campaign that an agent can be started on."""

    campaign: Campaign
    process: Process
    lacking: list[Check]
    resumed: bool


def prepare(root: Path, task: Task, target: str, agent: str, given: str | None = None) -> Prepared:
    """Prepare everything except the start. A campaign that was launched before goes on where it was.

    Args:
        root: the checkout.
        task: the task, in it.
        target: one of the task's targets.
        agent: a name of `agents.toml`.
        given: the command of the agent `command`.

    Raises:
        UsageError: the tree is dirty, the base branch or the target is missing, the campaign has ended, another
            command writes to it.
        MissingRequirement: Bash is too old, the agent is not installed.
    """
    demand_target(task, target)
    shell = bash.demand_bash()
    chosen = agents.find_agent(agent)
    repository = Repository(root)
    branch, base = _base(repository)
    _demand_clean(repository)
    name = name_of(task, target)
    words = {"bash": shell, "prompt": "", "worktree": "", "git": "", **({"command": given} if given else {})}
    command = agents.started_by(chosen, words, "")
    if not prepare_only():
        agents.demand_installed(agent, command)
    lacking = [check for check in doctor.kernel_checks([task]) if not check.ok]
    new = repository.commit_of(f"refs/heads/{branch_of(name)}") is None
    rules = _rules(repository, task, base) if new else None
    campaign, resumed = _opened(repository, task, name, base)
    if rules is not None:
        campaign.journal.append(
            Launched(
                target=target,
                agent=agent,
                base=base,
                base_branch=branch,
                rules=rules,
                hashes=protected_hashes(campaign.task),
                warnings=tuple(f"{check.name}: {check.found}" for check in lacking),
                confined=confine.can_confine(),
            )
        )
        for ref in (f"refs/heads/{campaign.best_branch}", campaign.head_ref):
            repository.run("update-ref", ref, base)
    state = campaign.state()
    if resumed and os.environ.get(BASE) and branch != state.launched.base_branch:
        raise UsageError(
            f"{BASE}={branch}: campaign {name} began from {state.launched.base_branch}; go on without {BASE}, or take "
            "the campaign's branches away to begin another one"
        )
    if state.ended:
        raise UsageError(
            f"campaign {name} has ended: {state.ended}. Review and promote it, then take its branches away to begin "
            f"another one: git worktree remove {campaign.repository.root} && git branch -D {campaign.branch} "
            f"{campaign.best_branch}"
        )
    with campaign.alone():
        if agent != state.agents[-1]:
            campaign.journal.append(Continued(agent=agent, confined=confine.can_confine()))
        campaign.sync(state)
    path = repository.common / STATE_FOLDER / f"{name}.prompt.md"
    text = prompt.compose(list(prompt.sections(campaign, state, lacking)), state.launched.rules.prompt_tokens)
    path.write_text(text, encoding="utf-8")
    where = campaign.repository.root
    words |= {"worktree": str(where), "git": str(repository.common)}
    process = make_process(campaign, chosen, words, path, where, confine.writable(campaign), cache_folder(root))
    return Prepared(campaign, process, lacking, resumed)


def make_process(
    campaign: Campaign,
    agent: agents.Agent,
    words: dict[str, str],
    prompt: Path,
    where: Path,
    own: Sequence[Path],
    cache: Path,
) -> Process:
    """Make the process of an agent on a prompt; bwrap confines it, if that works here.

    Args:
        campaign: whose temporary files and caches the agent uses.
        agent: how it is started.
        words: values of the words in braces in its command, except `prompt`; `bash` is its shell.
        prompt: the prompt's file.
        where: the folder that it starts in.
        own: the folders that it may write to when it is confined, beside those that `agent` lists.
        cache: the fetched upstream files.

    Raises:
        UsageError: a word in braces that was not given.
    """
    command = agents.started_by(agent, words | {"prompt": str(prompt)}, prompt.read_text(encoding="utf-8"))
    environment = _environment(cache, words["bash"], prompt) | agent.environment
    if confine.can_confine():
        command = confine.confined(where, own, command, agent.writable)
        environment |= confine.environment(campaign)
        for name in confine.environment(campaign).values():
            Path(name).mkdir(parents=True, exist_ok=True)
    return Process(command, environment, where, prompt, agent.prompt == "stdin")


def start(process: Process) -> int:
    """Run the agent until it ends; returns its exit code.

    Raises:
        ArmFailed: it cannot be started.
    """
    environment = {name: value for name, value in os.environ.items() if name != "KDA_ROOT"} | process.environment
    source = process.prompt.open("rb") if process.by_stdin else subprocess.DEVNULL
    try:
        return subprocess.run(process.command, cwd=process.where, env=environment, stdin=source, check=False).returncode
    except OSError as error:  # not a program of this machine, or a prompt longer than an argument may be
        raise ArmFailed(f"{process.command[0]}: the agent could not be started: {error.strerror}") from None
    finally:
        if source is not subprocess.DEVNULL:
            source.close()  # type: ignore[union-attr]


def prepare_only() -> bool:
    """Whether `KDA_NO_CLAUDE` says that no agent is to be started."""
    return os.environ.get(PREPARE_ONLY, "0") not in ("", "0")


def _base(repository: Repository) -> tuple[str, str]:
    """Name and commit of the branch that a campaign begins from."""
    if repository.ask("rev-parse", "--git-dir") is None:
        raise UsageError(f"{repository.root}: expected a git checkout: a campaign lives in a git worktree")
    named = os.environ.get(BASE)
    branch = named or repository.ask("symbolic-ref", "--short", "HEAD")
    if not branch:
        raise UsageError(f"no branch is checked out: name the one to begin from, {BASE}=main")
    if (commit := repository.commit_of(branch)) is None:
        known = (repository.ask("for-each-ref", "--format=%(refname:short)", "refs/heads") or "").split()
        raise UsageError(f"{BASE}={branch}: no such branch; nearest: {', '.join(nearest(branch, known))}")
    return branch, commit


def _demand_clean(repository: Repository) -> None:
    if changed := repository.run("status", "--porcelain").splitlines():
        shown = ", ".join(line[3:] for line in changed[:5])
        raise UsageError(
            f"{repository.root}: {len(changed)} changed or new files ({shown}): commit or remove them first, since the "
            "campaign begins from a commit and would lack them"
        )


def _folder(repository: Repository, task: Task) -> Path:
    """The task's folder below the checkout."""
    return task.path.resolve().relative_to(repository.root.resolve())


def _rules(repository: Repository, task: Task, base: str) -> Rules:
    """The task's rules in the base, read before anything is created: a launch that fails later leaves it behind.

    Raises:
        UsageError: the base has no such task, or its rules are invalid.
    """
    folder = _folder(repository, task)
    if not repository.content(base, f"{folder.as_posix()}/config.toml"):
        raise UsageError(f"{folder}: the base has no such task; commit it, or set {BASE} to a branch that has it")
    with TemporaryDirectory(prefix="kda-base-") as temporary:
        repository.extract(base, folder.as_posix(), Path(temporary))
        try:
            return read_rules(Task(Path(temporary) / folder))
        except UsageError as error:
            raise UsageError(str(error).replace(f"{temporary}/", "")) from None


def _opened(repository: Repository, task: Task, name: str, base: str) -> tuple[Campaign, bool]:
    """The campaign's worktree, made where it is missing; and whether it was launched before."""
    place, branch = worktree_of(repository.root, name), branch_of(name)
    there = repository.commit_of(f"refs/heads/{branch}") is not None
    if not there:
        _set_aside(repository, name)
    if not place.is_dir():
        repository.run("worktree", "prune")
        place.parent.mkdir(parents=True, exist_ok=True)
        new = [] if there else ["-b", branch]
        repository.run("worktree", "add", "--quiet", *new, str(place), *([branch] if there else [base]))
    worktree = Repository(place)
    if (now := worktree.ask("symbolic-ref", "--short", "HEAD")) != branch or worktree.common != repository.common:
        raise UsageError(
            f"{place}: expected this repository's worktree on branch {branch}, got {now or 'something else'}"
        )
    campaign = Campaign(name, Task(place / _folder(repository, task)), worktree)
    if there and not campaign.journal.read():
        raise UsageError(f"branch {branch} is there, and its record {campaign.journal.path} is not: remove the branch")
    return campaign, there


def _set_aside(repository: Repository, name: str) -> None:
    """Rename record and candidates of a campaign whose branches were removed: the name gets the launch time."""
    record = repository.common / STATE_FOLDER / f"{name}.jsonl"
    if entries := Journal(record, name, "").read():
        old = f"{name}.{entries[0].utc.replace(':', '')}"
        refs = repository.run("for-each-ref", "--format=%(refname) %(objectname)", f"refs/kda/{name}/").splitlines()
        moves = [f"update {ref.replace(name, old, 1)}\ndelete {ref.split()[0]}\n" for ref in refs]
        repository.run("update-ref", "--stdin", given="".join(moves))
        record.rename(record.with_name(f"{old}.jsonl"))


def _environment(cache: Path, shell: str, path: Path) -> dict[str, str]:
    """The agent's variables: this kda first on the path, the fetched upstream files, its Bash, the prompt."""
    return {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "KDA_CACHE": str(cache),
        "SHELL": shell,
        bash.VARIABLE: shell,
        "KDA_PROMPT": str(path),
    }
