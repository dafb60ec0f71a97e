"""Which agents can be launched, and how: `agents.toml` here, and the user's own file of the same form."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from string import Formatter
from typing import Literal

from pydantic import Field, field_validator

from kda_judge.contract.errors import MissingRequirement, UsageError
from kda_judge.contract.near_names import nearest
from kda_judge.contract.strict_models import Strict, read_toml, validate

OWN = Path(__file__).with_name("agents.toml")
VARIABLE = "KDA_AGENTS"
USUAL = Path(".config") / "kda" / "agents.toml"
"""Below the home folder."""


WORDS = ("bash", "command", "git", "prompt", "worktree")
"""What may stand in braces in a command."""


class Agent(Strict):
    """How one agent is started."""

    command: tuple[str, ...] = Field(min_length=1)
    prompt: Literal["stdin", "argument", "file"] = "stdin"
    environment: dict[str, str] = {}
    writable: tuple[str, ...] = ()

    @field_validator("command")
    @classmethod
    def _filled_in(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        for part in command:
            words = [more for _, *more in Formatter().parse(part) if more[0] is not None]
            if "\0" in part or any(word not in WORDS or form or conversion for word, form, conversion in words):
                raise ValueError(f"expected no words in braces but {', '.join(WORDS)}, got {part!r}")
        return command

    @field_validator("environment")
    @classmethod
    def _variables(cls, environment: dict[str, str]) -> dict[str, str]:
        for name, value in environment.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"expected names of variables, without =, and their values, got {name!r}")
        return environment

    @field_validator("writable")
    @classmethod
    def _folders(cls, writable: tuple[str, ...]) -> tuple[str, ...]:
        for name in writable:
            _home(name)
        return writable


class Agents(Strict):
    """A file of agents."""

    agents: dict[str, Agent]


def read_agents() -> dict[str, Agent]:
    """Name -> agent; the user's agents replace ours of the same name.

    Raises:
        UsageError: a file breaks the form, or is not there although `KDA_AGENTS` names it.
    """
    named = os.environ.get(VARIABLE)
    try:
        own = _home(named) if named else Path.home() / USUAL
    except ValueError as error:
        raise UsageError(f"{VARIABLE}: {error}") from None
    files = [OWN, *([own] if named or own.is_file() else [])]
    found: dict[str, Agent] = {}
    for file in files:
        found |= validate(Agents, read_toml(file), file).agents
    return found


def _home(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # no such user
        raise ValueError(f"expected a path, got {name!r}: {error}") from None


def find_agent(name: str) -> Agent:
    """The agent of that name; if there is none, a UsageError names the nearest."""
    agents = read_agents()
    if name not in agents:
        raise UsageError(
            f"--agent {name!r}: no such agent; nearest: {', '.join(nearest(name, agents))}. Describe your own in "
            f"~/{USUAL} or the file that {VARIABLE} names; {OWN.name} of kda_tools/campaign shows the form"
        )
    return agents[name]


def started_by(agent: Agent, words: dict[str, str], prompt: str) -> list[str]:
    """The command, filled in; if `prompt` is `argument`, the prompt is its last argument.

    Raises:
        UsageError: a word in braces that was not given.
    """
    filled = []
    for part in agent.command:
        try:
            filled.append(part.format_map(words))
        except KeyError as error:
            if error.args == ("command",):
                raise UsageError("--command: expected TEXT, the line of Bash that the agent runs, got none") from None
            known = ", ".join(f"{{{word}}}" for word in words)
            raise UsageError(f"agents: command {part!r}: expected words of {known}, got {{{error.args[0]}}}") from None
    return [*filled, prompt] if agent.prompt == "argument" else filled


def demand_installed(name: str, command: list[str]) -> None:
    """Raise a MissingRequirement if the program of the agent is not on PATH."""
    if shutil.which(command[0]) is None:
        raise MissingRequirement(
            f"--agent {name}: {command[0]}: not found on PATH; install it, name another agent, or set KDA_NO_CLAUDE=1 "
            "to prepare everything and start nothing"
        )
