"""Which agents can be launched, and how: `agents.toml` here, and the user's own file of the same form."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Literal

from pydantic import Field

from kda_judge.contract.errors import MissingRequirement, UsageError
from kda_judge.contract.near_names import nearest
from kda_judge.contract.strict_models import Strict, read_toml, validate

OWN = Path(__file__).with_name("agents.toml")
VARIABLE = "KDA_AGENTS"
USUAL = Path(".config") / "kda" / "agents.toml"
"""Below the home folder."""


class Agent(Strict):
    """How one agent is started."""

    command: tuple[str, ...] = Field(min_length=1)
    prompt: Literal["stdin", "argument", "file"] = "stdin"
    environment: dict[str, str] = {}
    writable: tuple[str, ...] = ()


class Agents(Strict):
    """A file of them."""

    agents: dict[str, Agent]


def read_agents() -> dict[str, Agent]:
    """Name -> agent; the user's replace ours.

    Raises:
        UsageError: a file breaks the form, or `KDA_AGENTS` names none.
    """
    named = os.environ.get(VARIABLE)
    own = Path(named).expanduser() if named else Path.home() / USUAL
    files = [OWN, *([own] if named or own.is_file() else [])]
    found: dict[str, Agent] = {}
    for file in files:
        found |= validate(Agents, read_toml(file), file).agents
    return found


def find_agent(name: str) -> Agent:
    """The agent of that name; a UsageError names those that there are."""
    agents = read_agents()
    if name not in agents:
        raise UsageError(
            f"--agent {name!r}: no such agent; nearest: {', '.join(nearest(name, agents))}. Describe your own in "
            f"~/{USUAL} or the file that {VARIABLE} names; {OWN.name} of kda_tools/campaign shows the form"
        )
    return agents[name]


def started_by(agent: Agent, words: dict[str, str], prompt: str) -> list[str]:
    """The command, filled in; `argument` puts the prompt behind it.

    Raises:
        UsageError: a word in braces that is none, or one that was not given.
    """
    filled = []
    for part in agent.command:
        try:
            filled.append(part.format_map(words))
        except (KeyError, ValueError, IndexError) as error:
            missing = "--command gives it" if "command" in str(error) else f"known are {', '.join(sorted(words))}"
            raise UsageError(f"agents: command {part!r}: {error} is not known here: {missing}") from None
    return [*filled, prompt] if agent.prompt == "argument" else filled


def demand_installed(name: str, command: list[str]) -> None:
    """A MissingRequirement where the agent's program is not there."""
    if shutil.which(command[0]) is None:
        raise MissingRequirement(
            f"--agent {name}: {command[0]}: not found on PATH; install it, name another agent, or set KDA_NO_CLAUDE=1 "
            "to prepare everything and start nothing"
        )
