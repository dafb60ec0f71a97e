"""The page of a task's campaigns: what became of each step is on it and in its plot, beside what the step changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from core.tools.tests.campaign_toy import HYPOTHESIS, campaign, speed
from kda_tools.campaign import iterate, iterations_page, iterations_plot
from kda_tools.campaign.history import recorded
from kda_tools.campaign.iterations_page import FENCE, PAGE
from kda_tools.campaign.place import Campaign
from kda_tools.publish import plots
from kda_tools.publish.figures import BLUE, COLOURS
from kda_tools.publish.site import builder

__all__ = ["campaign"]
drawn = pytest.mark.skipif(plots.missing() is not None, reason=str(plots.missing()))


def tried(campaign: Campaign, *steps: tuple[float, str, str]) -> None:
    for value, message, verdict in steps:
        speed(campaign, value, verdict=verdict)
        iterate.iterate(campaign, message)


@pytest.fixture
def worked(campaign: Campaign) -> Campaign:
    """Kept, reverted, wrong, kept."""
    tried(
        campaign,
        (1.05, HYPOTHESIS, "FASTER"),
        (1.01, "two rows a block | fewer blocks", "FASTER"),
        (2.0, "leaves the factor out", "INCORRECT"),
        (1.10, "four rows a block: fewer still", "FASTER"),
    )
    return campaign


@drawn
def test_every_step_is_in_the_plot_and_on_the_page(worked: Campaign) -> None:
    files = iterations_page.contents(worked.task, recorded(worked.task))
    docs = worked.task.path / "docs"
    text, svg = files[docs / PAGE], files[docs / "plots" / "campaigns" / f"{worked.name}-1.svg"]
    assert f"(plots/campaigns/{worked.name}-1.svg)" in text
    assert "- 4 iterations: 2 keep, 1 revert, 1 failed\n" in text
    table = [[cell.strip() for cell in line.split(" | ")] for line in text.splitlines() if re.match(r"\| \d", line)]
    assert [cells[1] for cells in table] == ["keep", "revert", "failed", "keep"]
    assert table[1][2] == r"two rows a block \| fewer blocks", "a bar of a hypothesis ends no cell"
    steps = re.split(r"(?m)^### Iteration \d+: ", text)[1:]
    assert [step.partition("\n")[0] for step in steps][::3] == [HYPOTHESIS, "four rows a block: fewer still"]
    for step, value in zip(steps, ("1.05", "1.01", "2.0", "1.1"), strict=True):
        assert f"+# speed: {value}\n" in step.partition(f"{FENCE}diff\n")[2], "the diff stands beside its step"
    assert "| out-64x16 | device |" in steps[1]

    def points(colour: str) -> int:
        group = re.search(rf'<g id="points-{colour}">(.*?)\n   </g>', svg, re.DOTALL)
        return group[1].count("<use") if group else 0

    assert (points("green"), points("orange")) == (2, 1)
    assert svg.count(COLOURS[BLUE][0]) >= 2, "the best so far is a line"
    for label in ("best so far", "kept", "reverted", "failed"):
        assert f">{label}<" in svg


@drawn
def test_the_best_so_far_is_what_its_own_session_measured(worked: Campaign) -> None:
    state = worked.state()
    best = {
        number: iterations_plot.best_in(done)
        for number, done in state.finished_iterations.items()
        if done.against_baseline
    }
    assert {number: round(one.estimate, 1) for number, one in best.items() if one} == {1: 2.0, 2: 2.1, 4: 2.1}


@drawn
def test_publishing_writes_the_page_and_the_list_and_finds_what_is_old(worked: Campaign) -> None:
    root, task = worked.repository.root, worked.task
    guide = root / "docs" / "campaigns.md"
    guide.parent.mkdir()
    guide.write_text("# Campaigns\n\n<!-- kda:recorded-campaigns:begin -->\n<!-- kda:recorded-campaigns:end -->\n")
    assert len(iterations_page.publish(root, [task], check=True)) == 3
    assert len(iterations_page.publish(root, [task], check=False)) == 3
    assert iterations_page.publish(root, [task], check=True) == []
    assert f"| [{worked.name}](../toys/k90_axpy/docs/iterations.md) |" in guide.read_text()
    page = task.path / "docs" / PAGE
    page.write_text(page.read_text().replace("**failed**", "**keep**"))
    (old,) = iterations_page.publish(root, [task], check=True)
    assert "expected '**failed**" in old
    staged = builder._document(task, page)
    assert "<figure" in staged
    assert f'id="{worked.name}-1-points-green"' in staged, "the site draws it in its own colours"


def test_a_campaign_without_a_gpu_has_a_page_without_a_plot(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise iterate.ArmFailed("no such register")

    monkeypatch.setattr(iterate, "measure", failing)
    tried(campaign, (1.1, HYPOTHESIS, "FASTER"))
    (path,) = files = iterations_page.contents(campaign.task, recorded(campaign.task))
    assert path.name == PAGE
    assert "does not compile: no such register" in files[path]
    assert iterations_page.publish(Path("/nowhere"), [], check=False) == []
