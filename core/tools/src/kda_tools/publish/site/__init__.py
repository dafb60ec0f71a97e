"""Build the static site: a page for each task from its ledger, and the repository's own documents."""

from kda_tools.publish.site.builder import build

__all__ = ["build"]
