"""Cannot be imported."""

raise ImportError("libmissing.so")
