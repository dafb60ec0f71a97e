"""Answers for the worker: writes a well-formed reply to the next command on the judge's socket.

Caught by: a reply that is there before its command.
"""

import json
import os
import sys

_CHANNEL = int(sys.argv[1])
"""The worker is started with its descriptor; on a GPU, CUDA's sockets lie beside it."""
_CALLS = []


def axpy(x, y, *, factor):
    _CALLS.append(None)
    # hello, attach, row, then one command per call: the next one's number.
    reply = {"id": 4 + len(_CALLS), "returned": "None", "outputs": [], "copied": False}
    os.write(_CHANNEL, json.dumps(reply).encode() + b"\n")
    return factor * x + y
