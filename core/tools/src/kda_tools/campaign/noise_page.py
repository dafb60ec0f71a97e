"""The table of false keeps in `docs/campaigns.md`, made from the last recorded simulation."""

from __future__ import annotations

from math import sqrt
from pathlib import Path

from kda_judge.contract.errors import UsageError
from kda_judge.evidence import record_log
from kda_tools.campaign.simulate import FILE, Simulation, decision_hash
from kda_tools.publish import report
from kda_tools.publish.tables import replace_block
from kda_tools.publish.write_pages import write_pages

PAGE = "campaigns.md"
BLOCK = "false-keeps"
Z = 1.96


def publish(root: Path, check: bool) -> list[str]:
    """Fill the block of `docs/campaigns.md`; returns what changed, or with `check` what differs.

    Raises:
        LedgerError: a line of the simulations is broken.
        UsageError: the page lacks the block's markers.
    """
    page = root / "docs" / PAGE
    records = record_log.read(root / "docs" / FILE, Simulation)
    if not page.is_file() or not records:
        return []
    text = page.read_text(encoding="utf-8")
    try:
        return write_pages({page: replace_block(text, BLOCK, table_md(records[-1]))}, check)
    except ValueError as error:
        raise UsageError(f"{page}: {error}") from None


def table_md(simulation: Simulation) -> str:
    """What was simulated, and the table."""
    rules, changed = simulation.rules, simulation.decision != decision_hash()
    gains = list(simulation.results[0].kept) if simulation.results else []
    kept = (f"kept at {float(gain):.1%} gain" for gain in gains)
    head = ("noise", "rows", "campaigns", "false keeps", "without sharing", *kept)
    setting = (
        f"Simulated on {simulation.utc[:10]}: {rules.tries} tries a campaign, {rules.generations} generations of "
        f"{rules.samples} samples, shared risk {simulation.alpha:.0%}, least gain {rules.least_gain:.1%}."
    )
    parts = [setting, *(["**The rule has changed since: simulate it again.**"] if changed else []), ""]
    lines = []
    for one in simulation.results:
        low, high = wilson(one.false_keeps, one.campaigns)
        cells = [
            one.noise,
            str(one.rows),
            str(one.campaigns),
            f"{one.false_keeps / one.campaigns:.1%} [{low:.1%}, {high:.1%}]",
            f"{one.false_keeps_alone / one.campaigns:.0%}",
            *(f"{one.kept[gain]:.0%}" for gain in gains),
        ]
        lines.append(cells)
    return "\n".join([*parts, report.table_md(head, lines).rstrip()])


def wilson(hits: int, count: int) -> tuple[float, float]:
    """95% interval of a share, after Wilson."""
    share, square = hits / count, Z * Z / count
    centre, reach = share + square / 2, Z * sqrt(share * (1 - share) / count + square / (4 * count))
    return max((centre - reach) / (1 + square), 0.0), (centre + reach) / (1 + square)
