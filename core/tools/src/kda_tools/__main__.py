"""``python -m kda_tools`` is ``kda``."""

from kda_tools.cli import main

main()
