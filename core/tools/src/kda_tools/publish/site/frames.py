"""Make row pages from the HTML of their task's page: same navigation, theme and scripts, another article.

Sphinx would lay out each row page again, which takes seconds for a hundred pages and gives the same frame.
"""

import re
from collections.abc import Mapping
from html import escape
from pathlib import Path

from kda_judge.contract.errors import KdaError

FRAME = "results.html"
"""The task's page. Its row pages are in the same folder, so that every relative link of the frame holds."""
ARTICLE = re.compile(r"(<article[^>]*>).*?(</article>)", re.DOTALL)
TITLE = re.compile(r"<title>.*?</title>", re.DOTALL)


def write_row_pages(folder: Path, drawn: Mapping[str, tuple[str, str]]) -> int:
    """Write every page of `drawn`, file name -> title and HTML; returns how many.

    Raises:
        KdaError: the theme's page has no article or no title.
    """
    if not drawn:
        return 0
    frame = (folder / FRAME).read_text(encoding="utf-8")
    article, title = ARTICLE.search(frame), TITLE.search(frame)
    if article is None or title is None:
        raise KdaError(
            f"kda site: {folder.name}/{FRAME}: expected one <article> and one <title> of the theme, got none"
        )
    before, between = frame[: title.start()], frame[title.end() : article.start()]
    after = frame[article.end() :]
    for name, (words, html) in drawn.items():
        page = f"{before}<title>{escape(words)}</title>{between}{article[1]}\n{html}\n{article[2]}{after}"
        (folder / name).write_text(page, encoding="utf-8")
    return len(drawn)
