"""Where a run's seconds went."""

import re
import time

import pytest

from kda_judge.judge.spent import OTHER_COMMANDS, REST, Spent


def test_parts_are_counted_once_the_device_is_idle():
    waited = []
    spent = Spent(lambda: (time.sleep(0.05), waited.append(1)))
    with spent.on("oracle"):
        pass
    for command in ("verify", "attach", "verify"):
        begin = time.perf_counter()
        time.sleep(0.1)
        spent.answered(command, begin)
    with pytest.raises(ValueError, match="broken"), spent.on("draws"):
        raise ValueError("broken")
    time.sleep(0.05)
    line = spent.line(rows=2, arms=5)
    shares = {part: int(share) for part, share in re.findall(r"[:,] ([a-z ]+) (\d+)%", line)}
    assert list(shares) == ["verifying", OTHER_COMMANDS, "oracle", "draws", REST]
    assert sum(shares.values()) == pytest.approx(100, abs=len(shares) / 2)
    assert shares["verifying"] > shares[OTHER_COMMANDS] > shares["oracle"] > shares["draws"] == 0
    assert shares[REST] > 0
    assert waited == [1]
    total, each = map(float, re.match(r"([\d.]+) s, ([\d.]+) s a row and arm: ", line).groups())
    assert total / 10 == pytest.approx(each, abs=0.02)


def test_loops_against_the_clock_are_no_samples():
    spent = Spent()
    with spent.commands_as("holding to the clock"):
        begin = time.perf_counter()
        time.sleep(0.05)
        spent.answered("wall", begin)
    begin = time.perf_counter()
    time.sleep(0.01)
    spent.answered("wall", begin)
    assert re.search(r"holding to the clock (\d+)%, timing (\d+)%", spent.line(1, 1))
