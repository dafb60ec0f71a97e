"""End a worker's whole process tree with the worker, also daemons that left its group or its session.

The worker runs as the child of a supervisor, which forks it before any code of the arm is imported. Linux hands every
orphan below the supervisor to the supervisor (prctl(2), PR_SET_CHILD_SUBREAPER), so that nothing leaves the tree while
the supervisor lives. An arm that kills the supervisor ends its own worker, too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""From linux/prctl.h."""
CPUCLOCK_SCHED = 2
"""From linux/posix-timers.h: with a process id in the other bits, the clock that clock_getcpuclockid(3) gives."""
STAT_BYTES = 4096
"""More than /proc/PID/stat has: some fifty numbers, and a name of at most 64 bytes."""
ZOMBIE = "Z"
CHILDREN = "children"
"""File in a thread's folder, from proc(5): the processes that the thread has started, or inherited."""
STOPPED = ("T", "t", "X", ZOMBIE)
"""States of threads, from proc(5): stopped by a signal or a tracer, dead, ended."""


def die_with_parent(by: signal.Signals) -> None:
    """Have this process sent `by` when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)


def supervise(channel: int) -> None:
    """Fork, and return in the child. The caller stays as its supervisor.

    After the child, the supervisor ends all processes that the child started, and then itself, in the same way as the
    child ended. SIGTERM, or the end of the judge, ends the child. `channel` is the descriptor of the child's end of the
    judge's socket pair.
    """
    asked = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, asked)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    die_with_parent(signal.SIGTERM)
    supervisor, worker = os.getpid(), os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, asked)
        os.setpgid(0, 0)  # a signal to its own group does not reach the supervisor
        die_with_parent(signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)
        return
    os.close(channel)  # so that it closes when the worker ends
    status = None
    while status is None:
        if signal.sigwait(asked) == signal.SIGTERM:
            os.kill(worker, signal.SIGKILL)
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                status = ended[1]
                break
    with suppress(ChildProcessError):
        while True:
            for process in trees([os.getpid()])[os.getpid()][1:]:
                with suppress(OSError):
                    os.kill(process, signal.SIGKILL)
            os.waitpid(-1, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, asked)
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def trees(roots: Iterable[int]) -> dict[int, list[int]]:
    """For each process: itself, and all that run below it, parents before their children and the oldest first."""
    children: dict[int, list[int]] = {}
    for process in sorted(int(one.name) for one in os.scandir("/proc") if one.name.isdecimal()):
        with suppress(OSError):
            state, parent, *_ = _facts(f"/proc/{process}/stat")
            if state != ZOMBIE:
                children.setdefault(int(parent), []).append(process)
    found = {root: [root] for root in roots}
    for tree in found.values():
        for process in tree:
            tree.extend(children.get(process, ()))
    return found


def quick_trees(roots: Iterable[int]) -> dict[int, list[int]]:
    """As `trees`, but reads only the kernel's lists of children, and not every process of the machine.

    A child may be missing while one listed ahead of it ends (proc(5)). So this is for questions that are soon repeated.
    """
    found = {root: [root] for root in roots}
    if not Path("/proc/thread-self", CHILDREN).is_file():
        return trees(found)  # a kernel without that list
    for tree in found.values():
        for process in tree:
            tree.extend(_children(process))
    return found


def _children(process: int) -> list[int]:
    """The processes that the threads of this one have started, or inherited, and that run."""
    listed, found = list[int](), list[int]()
    with suppress(OSError):
        for thread in os.scandir(f"/proc/{process}/task"):
            with suppress(OSError):  # it ended meanwhile
                listed += map(int, Path(thread.path, CHILDREN).read_bytes().split())
    for child in sorted(listed):
        with suppress(OSError):
            if _facts(f"/proc/{child}/stat")[0] != ZOMBIE:
                found.append(child)
    return found


def detached(tree: Iterable[int]) -> list[str]:
    """The command lines of the processes in another session than the first one."""
    first, *rest = tree
    found = []
    for process in rest:
        with suppress(OSError):
            if os.getsid(process) != os.getsid(first):
                command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ")
                name, _, state = Path(f"/proc/{process}/stat").read_text().rpartition(")")
                if state.split()[0] != ZOMBIE:  # one that has ended since has no command line
                    found.append(command.decode(errors="replace").strip() or f"[{name.partition('(')[2]}]")
    return found


def cpu_s(processes: Iterable[int]) -> float:
    """Processor time that all threads of the processes have used; those that are gone count as nothing."""
    total = 0.0
    for process in processes:
        with suppress(OSError):
            total += time.clock_gettime(~process << 3 | CPUCLOCK_SCHED)
            ended = _facts(f"/proc/{process}/stat")[13:15]
            total += sum(map(int, ended)) / os.sysconf("SC_CLK_TCK")  # the time of children that were waited for
    return total


def stopped(process: int) -> bool:
    """Whether every thread of the process has been stopped, or is gone."""
    try:
        threads = list(os.scandir(f"/proc/{process}/task"))
    except OSError:  # the process is gone
        return True
    try:
        return all(_facts(f"{one.path}/stat")[0] in STOPPED for one in threads)
    except OSError:  # a thread ended meanwhile
        return False


def _facts(stat: str) -> list[str]:
    """The fields that proc(5) lists after a process's name, which may hold anything: first its state, then its parent.

    Uses system calls directly, because hundreds of these files are read around every sample.
    """
    file = os.open(stat, os.O_RDONLY)
    try:
        return os.read(file, STAT_BYTES).rpartition(b")")[2].decode().split()
    finally:
        os.close(file)
