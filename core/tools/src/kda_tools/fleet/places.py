"""Choose where in a cluster workers run. Pure functions of Ray's list of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kda_tools.fleet.pieces import Kind


@dataclass(frozen=True)
class Place:
    """One place for a worker: the node, and the slot on it."""

    node_id: str
    node: str
    slot: int
    slots: int

    @property
    def name(self) -> str:
        """Name of the worker here."""
        return f"{self.node}/{self.slot}"


def kind_of(nodes: Sequence[Mapping[str, Any]]) -> Kind:
    """What the work runs on: GPUs, if a live node has one."""
    return "cuda" if any(node["Resources"].get("GPU") for node in nodes if node["Alive"]) else "cpu"


def places(nodes: Sequence[Mapping[str, Any]], kind: Kind, most: int | None, per_node: int | None) -> list[Place]:
    """At most `most` places, taken from the nodes in turn, and at most `per_node` on one node.

    `nodes` is what `ray.nodes()` returns. Nodes of the same host name get a part of their id in the name.
    """
    resource = "GPU" if kind == "cuda" else "CPU"
    alive = [node for node in nodes if node["Alive"] and node["Resources"].get(resource, 0) >= 1]
    alive.sort(key=lambda node: (node["NodeManagerHostname"], node["NodeID"]))
    hosts = [node["NodeManagerHostname"] for node in alive]
    room = [min(int(node["Resources"][resource]), per_node or 1 << 20) for node in alive]
    used = [0] * len(alive)
    while sum(used) < min(most or 1 << 20, sum(room)):
        number = min((n for n in range(len(alive)) if used[n] < room[n]), key=lambda n: used[n])
        used[number] += 1
    return [
        Place(node["NodeID"], host if hosts.count(host) == 1 else f"{host}-{node['NodeID'][:6]}", slot, slots)
        for node, host, slots in zip(alive, hosts, used, strict=True)
        for slot in range(slots)
    ]
