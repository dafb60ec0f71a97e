"""Which configuration of its kernel a call takes, read from `tuned.json` beside the kernel. Standard library alone.

    TUNED = Table(__file__, "norm", Config)
    config = TUNED.select(major, width=5120, bytes=x.nbytes)

A table's lines are tried in order. `at_most` bounds what `select` is given, fields left out of `config` have the
dataclass's defaults, and `measured` says on which device and when the line was chosen, or that it was not measured.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

C = TypeVar("C")
"""A dataclass of plain values."""
DEFAULT_CAPABILITY = 9
"""Major number of the compute capability whose lines devices without lines of their own take."""


class Table(Generic[C]):
    """The table `name` of `tuned.json` beside `solution_file`, with configurations of the type `config`."""

    def __init__(self, solution_file: str, name: str, config: type[C]) -> None:
        self.path, self.name, self.config = Path(solution_file).with_name("tuned.json"), name, config

    @cached_property
    def lines(self) -> list[tuple[int, dict[str, float], C]]:
        """Capability, bounds and configuration of every line, in order; read when the table is first asked."""
        table: list[dict[str, Any]] = json.loads(self.path.read_text(encoding="utf-8"))[self.name]
        return [(line["capability"], line["at_most"], self.config(**line["config"])) for line in table]

    def select(self, capability: int, **features: float) -> C:
        """The configuration of the first line of this capability whose every bound holds."""
        own = any(major == capability for major, _, _ in self.lines)
        wanted = capability if own else DEFAULT_CAPABILITY
        for major, at_most, config in self.lines:
            if major == wanted and all(features[name] <= bound for name, bound in at_most.items()):
                return config
        raise ValueError(f"{self.path}: table {self.name!r}: expected a line of capability {wanted} for {features}")

    @property
    def configs(self) -> tuple[C, ...]:
        """The different configurations of all lines."""
        return tuple({repr(config): config for _, _, config in self.lines}.values())
