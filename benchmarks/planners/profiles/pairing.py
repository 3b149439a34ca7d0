"""Pairs the backward nodes of a profile with its forward nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileNode:
    """A node of the profile: seconds and bytes of the mini-batch; `colour` is None for nodes without a colour class."""

    name: str
    seconds: float
    size: float
    backward: bool
    colour: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Nodes by id, their edges, parameters, and forward operators, all and by colour class."""

    nodes: Mapping[int, ProfileNode]
    graph: nx.DiGraph
    parameters: frozenset[int]
    operators: Sequence[int]
    classes: Mapping[int | None, Sequence[int]]

    def partners(self, number: int) -> Sequence[int]:
        """The forward operators of a node's colour class."""
        return self.classes.get(self.nodes[number].colour, ())

    def keeps(self, number: int) -> bool:
        """True if a backward node reads the result of this one."""
        return any(self.nodes[reader].backward for reader in self.graph.successors(number))

    @property
    def tells_what_is_kept(self) -> bool:
        return any(self.keeps(number) for number in self.operators)


def profile_of(nodes: Mapping[int, ProfileNode], graph: nx.DiGraph) -> Profile:
    """Separate parameters from operators: they are forward nodes that read nothing, take no time and share a class."""
    forward = [number for number, node in nodes.items() if not node.backward]
    still = {number for number in forward if not (nodes[number].seconds or graph.in_degree(number))}
    mixed = {nodes[number].colour for number in forward if number not in still} - {None}
    parameters = frozenset(number for number in still if nodes[number].colour in mixed)
    operators = [number for number in forward if number not in parameters]
    classes: dict[int | None, list[int]] = {}
    for number in operators:
        if nodes[number].colour is not None:
            classes.setdefault(nodes[number].colour, []).append(number)
    return Profile(nodes=nodes, graph=graph, parameters=parameters, operators=operators, classes=classes)


def paired(profile: Profile) -> tuple[dict[int, float], float]:
    """Backward seconds of every forward operator that has a backward, and of the user's step."""
    seconds: dict[int, float] = {}
    step = 0.0
    for number, home in _homes(profile).items():
        for operator, share in _shares(profile, home):
            seconds[operator] = seconds.get(operator, 0.0) + share * profile.nodes[number].seconds
        step += 0.0 if home else profile.nodes[number].seconds
    return seconds, step


def read_by_loss(profile: Profile) -> set[int]:
    """Forward operators with a result that is read by backward nodes which belong to no forward operator."""
    homes = _homes(profile)
    return {a for a, b in profile.graph.edges if a in set(profile.operators) and b in homes and not homes[b]}


def _homes(profile: Profile) -> dict[int, Sequence[int]]:
    """The forward operators that each backward node belongs to; none for the loss and nodes that only it reads."""
    homes: dict[int, Sequence[int]] = {}
    for number in reversed(list(nx.topological_sort(profile.graph))):
        if profile.nodes[number].backward:
            readers = (homes[reader] for reader in profile.graph.successors(number) if homes.get(reader))
            coloured = profile.nodes[number].colour is not None
            homes[number] = profile.partners(number) if coloured else next(readers, ())
    return homes


def _shares(profile: Profile, operators: Sequence[int]) -> list[tuple[int, float]]:
    """Operators with their shares of their forward seconds."""
    total = sum(profile.nodes[operator].seconds for operator in operators)
    if not total:
        return [(operator, 1 / len(operators)) for operator in operators]
    return [(operator, profile.nodes[operator].seconds / total) for operator in operators]
