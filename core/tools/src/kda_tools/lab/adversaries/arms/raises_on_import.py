"""Cannot be imported.

Caught by: the judge's greeting is answered with the exception.
"""

raise ImportError("libmissing.so")
