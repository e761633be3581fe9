"""Which prompts go through the model together: pure functions of the prompts' token ids.

Prompts are sorted by length into batches under a budget of padded tokens, so that little is padded; a prefix that
many prompts share is computed once for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

TOKEN_BUDGET = 2048
"""Padded tokens of one forward pass: 1,024 is some 12 % slower on two cores, 4,096 no faster."""

SHARED_WORTH = 512
"""Tokens that sharing a prefix must save before it pays for the extra passes that it costs."""

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """Prompts of one padded pass: indices into the call's prompts, longest first."""

    prompts: tuple[int, ...]
    width: int


@dataclass(frozen=True)
class Group:
    """Prompts that share their first `prefix` tokens (0: none), and the batches that compute the rest of them."""

    prefix: int
    prompts: tuple[int, ...]
    batches: tuple[Batch, ...]


def plan(prompts: Mapping[int, Ids], *, budget: int = TOKEN_BUDGET, share: bool = True) -> list[Group]:
    """The passes that compute every prompt (request → ids) once, following from the prompts alone.

    >>> [(g.prefix, g.batches) for g in plan({0: (1, 2, 3), 1: (4,)})]
    [(0, (Batch(prompts=(0, 1), width=3),))]
    """
    groups = shared_prefixes(prompts) if share else []
    grouped = {index for _, members in groups for index in members}
    alone = [index for index in prompts if index not in grouped]
    planned = [Group(0, tuple(alone), tuple(_batches(prompts, alone, 0, budget)))] if alone else []
    for prefix, members in groups:
        planned.append(Group(prefix, tuple(members), tuple(_batches(prompts, members, prefix, budget))))
    return planned


def _batches(prompts: Mapping[int, Ids], members: Sequence[int], prefix: int, budget: int) -> list[Batch]:
    """Batches of what follows the prefix, longest first; a prompt that is all prefix needs none."""
    rest = {index: len(prompts[index]) - prefix for index in members}
    order = sorted((index for index in members if rest[index]), key=lambda index: (-rest[index], index))
    batches: list[Batch] = []
    start = 0
    while start < len(order):
        width = rest[order[start]]
        # a copy of the prefix's keys and values stands beside each prompt: it bounds the batch too, more loosely
        room = max(1, min(budget // width, 8 * budget // (prefix + width)))
        chosen = order[start : start + room]
        batches.append(Batch(tuple(chosen), width))
        start += len(chosen)
    return batches


def shared_prefixes(prompts: Mapping[int, Ids], worth: int = SHARED_WORTH) -> list[tuple[int, list[int]]]:
    """Disjoint groups of prompts with the length of the prefix that each group shares, saving the most tokens.

    In sorted order, prompts with a common prefix stand together, and the common prefixes of neighbours make a tree
    over that order. At each node, what its parts do not group better among themselves may share the node's prefix.
    """
    order = sorted(prompts, key=lambda index: prompts[index])
    common = [_common(prompts[a], prompts[b]) for a, b in pairwise(order)]
    open_nodes: list[tuple[int, list[_Part]]] = []  # (prefix, parts so far), prefixes growing towards the end
    done = _Part((), 0, ())
    for place, index in enumerate(order):
        prefix = common[place] if place < len(common) else -1
        done = _Part((index,), 0, ())
        while open_nodes and open_nodes[-1][0] > prefix:
            closed, parts = open_nodes.pop()
            done = _closed(closed, [*parts, done], worth)
        if open_nodes and open_nodes[-1][0] == prefix:
            open_nodes[-1][1].append(done)
        else:
            open_nodes.append((prefix, [done]))
    return [(prefix, sorted(members)) for prefix, members in done.groups]


@dataclass(frozen=True)
class _Part:
    """A node of the tree: prompts that stand alone so far, and the groups with the tokens that they save."""

    alone: Ids
    saved: int
    groups: tuple[tuple[int, Ids], ...]

    @property
    def members(self) -> Ids:
        return self.alone + tuple(index for _, members in self.groups for index in members)


def _closed(prefix: int, parts: list[_Part], worth: int) -> _Part:
    """A node whose prompts share `prefix`: its parts side by side, with one more group where that saves more."""
    joined: list[int] = []
    kept: list[tuple[int, Ids]] = []
    saved = -prefix - worth
    for part in parts:
        # a part's own groups stay when they save more than this shorter prefix would for their members
        whole = not part.groups or prefix * (len(part.members) - len(part.alone)) >= part.saved
        joined += part.members if whole else part.alone
        kept += () if whole else part.groups
        saved += prefix * len(part.members if whole else part.alone) + (0 if whole else part.saved)
    apart = sum(part.saved for part in parts)
    if saved > apart:
        return _Part((), saved, ((prefix, tuple(joined)), *kept))
    alone = tuple(index for part in parts for index in part.alone)
    return _Part(alone, apart, tuple(group for part in parts for group in part.groups))


def _common(a: Ids, b: Ids) -> int:
    """How many leading tokens two prompts share."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # by halves, since comparing slices is fast and prompts are long
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
