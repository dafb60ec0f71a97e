"""The process of a piece in the tests of the fleet: as `piece_process`, but that it sleeps instead of working.

Started as `python fleet_toy.py [JOB] DESCRIPTOR`, with the question on standard input.
Of a piece `gate:FILE` the answer comes once that file is there. `long:FILE` makes it and waits for Ctrl-C.
"""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

FACTS = {
    "host": "toy",
    "kind": "cpu",
    "commit": "0" * 40,
    "dirty": False,
    "versions": {},
    "files": {},
    "cores": 1,
    "cpu": "toy",
}


def answer(question):
    piece = question["piece"]
    if piece is None:
        return {"line": json.dumps(FACTS)}
    said = json.dumps({"piece": piece["id"], "attempt": question["attempt"], "items": piece["items"]})
    if piece["subject"] == "refuses":
        return {"refused": "the toy refuses", "exit_code": 2}
    if piece["subject"] == "hangs" and question["attempt"] == 1:
        time.sleep(600)
    if piece["subject"] == "gate":
        while not Path(piece["items"][0]).exists():
            time.sleep(0.02)
    elif piece["subject"] == "long":
        try:
            Path(piece["items"][0]).touch()
            time.sleep(600)
        except KeyboardInterrupt:
            return {"line": said, "complete": False, "items": piece["items"][:1]}
    else:
        time.sleep(0.03)
    return {"line": said}


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(os.environ["KDA_FLEET_ACTOR"]):
        sys.exit("the actor has ended")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with open(int(sys.argv[-1]), "w") as file:  # noqa: PTH123  # it has no path
        file.write(json.dumps(answer(json.load(sys.stdin))) + "\n")
