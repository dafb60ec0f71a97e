"""The static site: a page per task made of its ledger, and the repository's own documents around them."""

from kda_tools.publish.site.builder import build

__all__ = ["build"]
