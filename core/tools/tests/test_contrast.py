"""Colours that people can tell apart, by the contrast of WCAG 2.2: the palette of plots and pages, light and dark.

`test_site.py` asks the same of every text that a browser shows. Words need 4.5 (1.4.3, level AA), marks of a plot 3
(1.4.11). The grounds are the theme's, which its style sheet states, and those of GitHub, which shows the same plots.
"""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from kda_tools.publish import plots, summary_plots
from kda_tools.publish.figures import BLUE, COLOURS, GREEN, GRID, MUTED, ORANGE, TEXT
from kda_tools.publish.site import builder

WORDS, MARKS = 4.5, 3.0
LARGE_PX, LARGE_BOLD_PX, LARGE = 24.0, 18.66, 3.0
"""Text of at least that size needs less."""
CSS = (builder.STATIC / "kda.css").read_text(encoding="utf-8")
GITHUB = {"light": ("#ffffff",), "dark": ("#0d1117",)}
SCHEMES = ("light", "dark")


class Colour(NamedTuple):
    """sRGB from 0 to 255, and how opaque, from 0 to 1."""

    red: float
    green: float
    blue: float
    alpha: float = 1.0

    def over(self, ground: "Colour") -> "Colour":
        """What is seen of it in front of an opaque ground."""
        mixed = (self.alpha * mine + (1 - self.alpha) * its for mine, its in zip(self[:3], ground[:3], strict=True))
        return Colour(*mixed)


def hex_colour(text: str) -> Colour:
    """`#fff` or `#ffffff`."""
    digits = text.removeprefix("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    return Colour(*(int(digits[place : place + 2], 16) for place in (0, 2, 4)))


def luminance(colour: Colour) -> float:
    """WCAG's relative luminance, 0 to 1."""
    linear = [
        share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4
        for share in (value / 255 for value in colour[:3])
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: Colour, other: Colour) -> float:
    """WCAG's contrast ratio, 1 to 21."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def needed(size_px: float, weight: float) -> float:
    """The contrast that text of this size and weight needs."""
    return LARGE if size_px >= LARGE_PX or (weight >= 700 and size_px >= LARGE_BOLD_PX) else WORDS


def palette(colour: str, scheme: str) -> Colour:
    """A placeholder's colour in one scheme."""
    return hex_colour(COLOURS[colour][1 + SCHEMES.index(scheme)])


def grounds(scheme: str) -> dict[str, Colour]:
    """Name -> what may lie behind: the page, a hovered line, the side bar and menus, and GitHub's page."""
    spec = find_spec("furo")
    if spec is None or spec.origin is None:
        pytest.skip("the theme furo is not installed")
    text = (Path(spec.origin).parent / "theme/furo/static/styles/furo.css").read_text(encoding="utf-8")
    found = {}
    for name in ("primary", "secondary", "hover"):
        values = re.findall(rf"--color-background-{name}:\s*(#[0-9a-f]{{3,6}})\b", text)
        assert len(set(values)) == 2, f"furo.css: expected a light and a dark {name}, got {values}"
        found[name] = hex_colour(values[0] if scheme == "light" else values[-1])
    return found | {f"GitHub {value}": hex_colour(value) for value in GITHUB[scheme]}


def opacity(selector: str) -> float:
    """What the style sheet says of it."""
    found = re.search(rf"^{re.escape(selector)} {{[^}}]*opacity: (\d*\.?\d+)", CSS, re.MULTILINE)
    assert found, selector
    return float(found[1])


def test_the_formula() -> None:
    """Black on white, and a grey that is known to be just too light."""
    assert contrast(hex_colour("#000"), hex_colour("#fff")) == pytest.approx(21)
    assert contrast(hex_colour("#767676"), hex_colour("#ffffff")) == pytest.approx(4.54, abs=0.005)
    assert contrast(hex_colour("#777777"), hex_colour("#ffffff")) == pytest.approx(4.48, abs=0.005)
    assert Colour(0, 0, 0, 0.5).over(hex_colour("#fff"))[:3] == (127.5, 127.5, 127.5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_words_can_be_read_and_marks_seen(scheme: str) -> None:
    """Verdicts are written in blue and orange, so these need as much as words do; lines of the grid only decorate."""
    least = {TEXT: WORDS, MUTED: WORDS, BLUE: WORDS, ORANGE: WORDS, GREEN: MARKS}
    assert set(least) == set(COLOURS) - {GRID}
    for name, ground in grounds(scheme).items():
        ratios = {COLOURS[colour][0]: contrast(palette(colour, scheme), ground) for colour in least}
        assert [key for colour in least if ratios[key := COLOURS[colour][0]] < least[colour]] == [], (name, ratios)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_samples_are_seen_on_their_lanes(scheme: str) -> None:
    """Both are translucent: a tick lies on a lane, and the lane on the page."""
    page = grounds(scheme)["primary"]
    lane = palette(GRID, scheme)._replace(alpha=opacity(".kda-strips rect")).over(page)
    tick = palette(BLUE, scheme)._replace(alpha=opacity(".kda-strips path")).over(lane)
    assert contrast(tick, lane) >= MARKS
    assert contrast(palette(ORANGE, scheme), lane) >= MARKS


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_are_seen_beside_their_mean(scheme: str) -> None:
    for ground in (grounds(scheme)["primary"], *map(hex_colour, GITHUB[scheme])):
        for colour, _ in summary_plots.KINDS.values():
            tick = palette(colour, scheme)._replace(alpha=summary_plots.ROW_OPACITY).over(ground)
            assert contrast(tick, ground) >= MARKS, COLOURS[colour][0]


@pytest.mark.parametrize("kinds", [summary_plots.KINDS, plots.SERIES])
def test_no_series_is_told_by_its_colour_alone(kinds: dict[str, tuple[str, ...]]) -> None:
    """Two of one plot differ in their marks as well (1.4.1)."""
    marks = [kind[1] for kind in kinds.values()]
    assert len(set(marks)) == len(marks) > 1
