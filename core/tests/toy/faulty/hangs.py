"""Never answers."""

import time


def axpy(x, y, *, factor):
    time.sleep(3600)
