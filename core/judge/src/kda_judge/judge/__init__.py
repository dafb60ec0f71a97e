"""One row from its inputs to its verdict."""
