"""Never answers.

Caught by: the judge's timeout.
"""

import time


def axpy(x, y, *, factor):
    time.sleep(3600)
