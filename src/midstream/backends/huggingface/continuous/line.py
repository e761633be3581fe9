"""Who comes next, and with whom: requests that wait for room, first come, first served, and where they sit.

Small requests may pass large ones that do not fit yet, but not for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")

PASSED: Final = 64
"""How often a request lets others pass that want what it lacks; then they wait with it."""


class Line(Generic[Item]):
    """Items in the order in which they came. wants: what an item wants room of, by name.

    >>> line = Line[int](lambda size: ("room",))
    >>> for size in (9, 2, 1):
    ...     line.add(size)
    >>> line.take(lambda size: None if size < 2 else "room"), line.take(lambda size: None), len(line)
    (1, 9, 1)
    """

    def __init__(self, wants: Callable[[Item], Collection[str]]) -> None:
        self._wants = wants
        self._items: list[Item] = []
        self._passed: list[int] = []

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: Item) -> None:
        """One more, at the end."""
        self._items.append(item)
        self._passed.append(0)

    def remove(self, item: Item) -> bool:
        """Whether it waited; it does no more."""
        place = next((place for place, one in enumerate(self._items) if one is item), None)
        if place is not None:
            del self._items[place], self._passed[place]
        return place is not None

    def take(self, lacks: Callable[[Item], str | None]) -> Item | None:
        """The first that may go; None where there is none. lacks: of what there is too little for an item."""
        kept: set[str] = set()  # for those who have waited long enough
        for place, item in enumerate(self._items):
            lacking = lacks(item)
            if lacking is None and kept.isdisjoint(self._wants(item)):
                self._passed[:place] = [count + 1 for count in self._passed[:place]]
                del self._items[place], self._passed[place]
                return item
            if lacking is not None and self._passed[place] >= PASSED:
                kept.add(lacking)
        return None


def table_for(tables: Mapping[int, tuple[int, int]], reach: int, most: int) -> int | None:
    """The table at which a sequence of `reach` tokens sits; None: nowhere yet.

    tables: number → how many sit there, and the longest reach among them. Who sits together shares passes, and is
    padded to the longest; all tables together have at most `most` tokens. One that is much shorter than the others
    sits apart, once half of these are taken.

    >>> table_for({0: (3, 100)}, 50, 900), table_for({0: (3, 100)}, 10, 400), table_for({0: (3, 100)}, 101, 400)
    (0, 1, None)
    """
    whole = sum(count * longest for count, longest in tables.values())
    if whole + reach > most:
        return None
    grown = [
        (whole - count * longest + (count + 1) * max(longest, reach), table)
        for table, (count, longest) in tables.items()
    ]
    size, table = min(grown, default=(most + 1, 0))
    if size <= most and (size <= most // 2 or size <= whole + 2 * reach):
        return table
    return next(number for number in range(len(tables) + 1) if number not in tables)
