"""Show the suite as a table (`nox -s adversaries`). Exit code 1 when the judge says what it should not."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from concurrent.futures import as_completed
from pathlib import Path
from textwrap import shorten

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kda_judge.contract.errors import ExitCode, KdaError
from kda_judge.contract.near_names import nearest
from kda_judge.evidence import gpu_state
from kda_tools.lab.adversaries import page, share, suite
from kda_tools.lab.adversaries.table import ADVERSARIES, Kind

LONGEST_WORDS = 120
"""Most characters of the judge's reason if it is as expected, so that an adversary takes one line."""
WIDTH = 200
"""Columns of the table if the output is no terminal, as in a log."""


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Parse the arguments; wrong ones end the program with a message."""
    parser = argparse.ArgumentParser("nox -s adversaries --", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these adversaries")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="append the run to FILE and write the page beside it (.md)"
    )
    parser.add_argument(
        "--missing",
        action="store_true",
        help="with --record: only those whose result the latest run in FILE lacks, or has otherwise than expected",
    )
    given = parser.parse_args(arguments)
    known = [one.name for one in ADVERSARIES]
    for name in given.names:
        if name not in known:
            parser.error(f"no adversary {name!r}; nearest: {', '.join(nearest(name, known))}")
    if given.record and given.names:
        parser.error("--record: expected a run of the whole suite, or --missing, got names of adversaries")
    if given.missing and not given.record:
        parser.error("--missing: expected with --record")
    return given


def main(arguments: list[str]) -> int:
    """Run the adversaries, print the table, and record the run with `--record`."""
    given = parsed(arguments)
    try:
        return run(given)
    except KdaError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def run(given: argparse.Namespace) -> int:
    """The same with parsed arguments; raises KdaError if the machine or the file of records is unfit."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # treated as Ctrl-C, unless the parent had it ignored
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    kind: Kind = given.device if given.device != "auto" else "cuda" if gpu_state.has_gpu() else "cpu"
    begin = time.monotonic()
    chosen = suite.chosen(kind, tuple(given.names), ADVERSARIES)
    if given.missing and given.record.is_file() and (last := page.latest(page.read(given.record)).get(kind)):
        wanted = page.differing(last)
        chosen = [one for one in chosen if one.name in wanted]
        if not chosen:
            print(f"every adversary has the expected result on the {page.DEVICES[kind]}: {given.record}")
            return ExitCode.OK
    names = share.devices() if kind == "cuda" else []
    gpus = max(1, len(names))
    keep = page.keeper(given.record, page.begun(kind, gpus, len(chosen), given.missing)) if given.record else None
    found: dict[str, suite.JudgedRow] = {}
    results: list[suite.JudgedRow] = []
    try:
        with share.started(chosen, kind, names) if len(names) > 1 else suite.started(chosen, kind) as futures:
            for future in as_completed(futures.values()):
                got = future.result()
                found[got.adversary.name] = got
                results = [found[one.name] for one in chosen if one.name in found]
                if keep:
                    keep(results, time.monotonic() - begin)
                print(f"[{len(found)}/{len(chosen)}] {line(got)}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        show(results, kind, time.monotonic() - begin, gpus)
        if keep and results:  # the interrupt may have come while it wrote
            keep(results, time.monotonic() - begin)
        kept = f"; these are in {given.record}, and --missing runs the others" if keep else ""
        print(f"interrupted: {len(results)} of {len(chosen)} adversaries had ended{kept}", file=sys.stderr)
        return ExitCode.INTERRUPTED
    show(results, kind, time.monotonic() - begin, gpus)
    return ExitCode.UNFIT_ROWS if any(got.wrong for got in results) else ExitCode.OK


def line(got: suite.JudgedRow) -> str:
    """An ended run in one line."""
    phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in got.phases)
    wrong = f": {got.wrong}" if got.wrong else ""
    return f"{got.adversary.name}: {got.name} {'WRONG' if wrong else 'ok'}, {got.seconds:.0f} s ({phases}){wrong}"


def show(results: list[suite.JudgedRow], kind: Kind, seconds: float, gpus: int = 1) -> None:
    """Print the table."""
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    table = Table(box=None, pad_edge=False)
    for column in ("adversary", "expected", "got", "", "what the judge said"):
        table.add_column(column, no_wrap=column != "what the judge said", overflow="ellipsis")
    for got in results:
        ending = got.adversary.on(kind)
        assert ending is not None
        mark = Text("WRONG", "red") if got.wrong else Text("ok", "green") if ending.caught else Text("missed", "yellow")
        words = got.wrong or shorten(
            f"not caught: {ending.missed}" if ending.missed else got.deciding_words, LONGEST_WORDS
        )
        table.add_row(got.adversary.name, ending.name, got.name, mark, Text(words))
    console.print(table)
    wrong = sum(got.wrong is not None for got in results)
    missed = sum(not ending.caught for got in results if (ending := got.adversary.on(kind)))
    where = "the CPU" if kind == "cpu" else "a GPU" if gpus == 1 else f"{gpus} GPUs"
    console.print(
        f"{len(results)} adversaries on {where} in {seconds:.0f} s: "
        f"{len(results) - wrong} end as expected, {missed} of these are known not to be caught, {wrong} differ"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
