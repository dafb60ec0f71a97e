"""Find the Bash for agents' scripts: version 4 or later. `KDA_BASH_BIN` names one if that on PATH is older."""

from __future__ import annotations

import os
import shutil
import subprocess

from kda_judge.contract.errors import MissingRequirement

VARIABLE = "KDA_BASH_BIN"
LEAST = 4


def demand_bash() -> str:
    """Path of the Bash to use: `KDA_BASH_BIN`, else the one on PATH.

    Raises:
        MissingRequirement: it is not there, does not run, or is too old.
    """
    named = os.environ.get(VARIABLE)
    program = shutil.which(named or "bash")
    remedy = (
        f"install a newer one (macOS: brew install bash) and set {VARIABLE}, for example to $(brew --prefix)/bin/bash"
    )
    if program is None:
        raise MissingRequirement(f"{named or 'bash'}: not found or not executable; {remedy}")
    command = [program, "-c", 'echo "${BASH_VERSINFO[0]:-0}"']
    try:
        version = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise MissingRequirement(f"{program}: does not run as Bash: {error}; {remedy}") from None
    if not version.isdecimal() or int(version) < LEAST:
        raise MissingRequirement(
            f"{program}: expected Bash {LEAST} or later, got version {version or 'unknown'}; {remedy}"
        )
    return program
