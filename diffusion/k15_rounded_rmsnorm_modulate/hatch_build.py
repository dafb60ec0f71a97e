"""A wheel holds this folder as a package of the folder's own name, whatever that is: a copy needs no other edit."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PARTS = ("__init__.py", "baseline", "bench", "lab", "solution", "config.toml", "prompt.md")


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling, as pyproject.toml says."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files of a wheel; an editable install needs the folder's parent alone."""
        folder = Path(self.root)
        parts = [folder / part for part in PARTS if version == "standard" and (folder / part).exists()]
        build_data["force_include"] = {str(part): f"{folder.name}/{part.name}" for part in parts}
