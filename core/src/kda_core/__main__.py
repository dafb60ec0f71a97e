"""``python -m kda_core`` is ``kda``."""

from kda_core.cli import main

if __name__ == "__main__":
    main()
