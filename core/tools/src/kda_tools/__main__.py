"""Run the `kda` command with `python -m kda_tools`."""

from kda_tools.cli import main

main()
