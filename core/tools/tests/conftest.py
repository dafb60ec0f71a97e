"""What these tests share with the judge's: a small real task in a temporary checkout."""

import pytest

from core.judge.tests.conftest import checkout, toy

__all__ = ["checkout", "toy"]


@pytest.fixture(autouse=True)
def _wide_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables do not wrap, whoever starts the tests."""
    monkeypatch.delenv("COLUMNS", raising=False)
