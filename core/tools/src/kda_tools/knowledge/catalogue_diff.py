"""Compare the fused ops of two upstream releases: ops that are gone, new, moved, or changed in what they require."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kda_judge.contract.errors import UsageError
from kda_tools.knowledge.op_facts import OpFacts, Release, load_facts

COMPARED = ("signature", "language", "kernels", "needs", "raises", "host_checks", "falls_back", "quality", "models")
"""Facts whose change concerns a caller. A changed path or file hash is reported separately."""


@dataclass(frozen=True)
class Change:
    """One op that differs between the two releases."""

    name: str
    moved: tuple[str, str] | None
    facts: dict[str, tuple[tuple[str, ...], tuple[str, ...]]]
    """Fact -> its values in the first release only, and in the second only."""

    @property
    def same_facts(self) -> bool:
        """Whether only the op's path and code have changed."""
        return not self.facts


@dataclass(frozen=True)
class Difference:
    """The differences of two releases."""

    first: Release
    second: Release
    gone: tuple[OpFacts, ...]
    new: tuple[OpFacts, ...]
    changed: tuple[Change, ...]
    same: tuple[str, ...]
    """Ops whose file and facts are the same."""


def find_release(root: Path, name: str) -> Release:
    """The release that a user named: a version whose facts are in the checkout, or a wheel.

    Raises:
        UsageError: it is neither; the message names the known releases.
    """
    if name.endswith(".whl"):
        from kda_tools.knowledge.extract_ops import extract

        return extract(Path(name))
    known = load_facts(root)
    for release in known:
        if name in (release.release, release.release.partition(" ")[2]):
            return release
    versions = ", ".join(release.release.partition(" ")[2] for release in known)
    raise UsageError(
        f"{name}: expected a release that the catalogue has ({versions}), or a wheel's file that ends in .whl"
    )


def difference(first: Release, second: Release) -> Difference:
    """The differences of two releases. Ops are matched by name, so a renamed op counts as gone and as new."""
    before, after = ({op.name: op for op in release.op} for release in (first, second))
    both = [name for name in before if name in after]
    pairs = [(before[name], after[name]) for name in both]
    changed = [_change(one, other) for one, other in pairs if one != other]
    return Difference(
        first,
        second,
        gone=tuple(before[name] for name in before if name not in after),
        new=tuple(after[name] for name in after if name not in before),
        changed=tuple(sorted(changed, key=lambda change: (change.same_facts, change.name))),
        same=tuple(one.name for one, other in pairs if one == other),
    )


def _change(one: OpFacts, other: OpFacts) -> Change:
    facts = {}
    for name in COMPARED:
        old, new = _items(one, name), _items(other, name)
        lost, won = tuple(x for x in old if x not in new), tuple(x for x in new if x not in old)
        if lost or won:
            facts[name] = (lost, won)
    return Change(one.name, (one.path, other.path) if one.path != other.path else None, facts)


def _items(op: OpFacts, name: str) -> tuple[str, ...]:
    value = getattr(op, name)
    return value if isinstance(value, tuple) else (value,) if value else ()


def lines(found: Difference) -> Iterator[str]:
    """The differences as lines for a terminal."""
    first, second = found.first.release, found.second.release
    yield (
        f"{first} has {len(found.first.op)} ops, {second} has {len(found.second.op)}: {len(found.gone)} gone, "
        f"{len(found.new)} new, {len(found.changed)} changed, {len(found.same)} the same"
    )
    for title, ops in (("gone", found.gone), ("new", found.new)):
        for op in ops:
            yield f"{title}: {op.name} ({'/'.join(op.language)}) {op.path}"
    for change in found.changed:
        yield f"changed: {change.name}{' (its code and place alone)' if change.same_facts else ''}"
        if change.moved:
            yield f"  moved: {change.moved[0]} -> {change.moved[1]}"
        for fact, (lost, won) in change.facts.items():
            yield from (f"  {fact}: - {text}" for text in lost)
            yield from (f"  {fact}: + {text}" for text in won)
