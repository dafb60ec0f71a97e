"""What a run of the judge works with; it stays the same during the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kda_judge.arms.arm_process import ArmProcess
from kda_judge.contract.config import Config
from kda_judge.evidence.run_record import Settings
from kda_judge.judge.quiet_core import QuietCore
from kda_judge.judge.spent import Spent


@dataclass(frozen=True)
class Setup:
    """Arms on one device, and what they are compared with."""

    config: Config
    reference: Any
    """The task's module with the oracle."""
    arms: Mapping[str, ArmProcess]
    settings: Settings
    device: str
    """The device's name in torch."""
    cores: QuietCore = field(default_factory=lambda: QuietCore([]))
    """The core that workers are pinned to while they are timed."""
    spent: Spent = field(default_factory=Spent)
    l2_bytes: int = 0
    """Bytes of the GPU's L2 cache; 0 on a CPU."""
