"""A shuffled stream of a harvest's rows, which goes on where it was left."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from midstream.core.errors import spec_error

if TYPE_CHECKING:
    from .reading import Column, Harvest


class RowStream(IterableDataset[Tensor]):
    """Batches `[batch, width]` of one layer's rows, each row once in an epoch, in an order that follows from the seed.

    buffer: rows that are mixed with one another at a time; what they are drawn from are runs of `run` neighbouring
    rows, themselves in random order, so that a disk is read in pieces. drop_last: leave out a last batch that is not
    full. Workers of a DataLoader (`batch_size=None`) give the same batches in the same order as none: each computes
    those whose number is its turn.

    `state_dict` says how many batches were taken; `load_state_dict` goes on after them, in this epoch.
    """

    def __init__(
        self,
        harvest: Harvest,
        layer: int | None,
        *,
        site: str | None = None,
        batch: int = 4096,
        buffer: int = 1 << 17,
        run: int = 256,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        for name, value in (("batch", batch), ("buffer", buffer), ("run", run)):
            if value < 1:
                raise spec_error("E_BAD_PARAM", name, f"is 1 or more, got {value}")
        self._column: Column = harvest.scores if layer is None else harvest.rows(layer, site)
        self.batch, self.buffer, self.run, self.seed, self.drop_last = batch, buffer, run, seed, drop_last
        self.epoch, self.taken = 0, 0

    def __len__(self) -> int:
        """Batches of one epoch."""
        rows = len(self._column)
        return rows // self.batch if self.drop_last else -(-rows // self.batch)

    def __iter__(self) -> Iterator[Tensor]:
        """The batches that were not taken yet; at the end of them the next epoch begins."""
        worker = get_worker_info()
        index, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        order = _Order(len(self._column), self.run, self.buffer, (self.seed, self.epoch))
        for number in range(self.taken + index, len(self), count):
            rows = self._column.take(order[number * self.batch : (number + 1) * self.batch])
            self.taken = number + 1
            yield rows
        self.epoch, self.taken = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, in JSON; where workers draw, `taken` has to be counted by whoever takes their batches."""
        return {"seed": self.seed, "epoch": self.epoch, "taken": self.taken, "batch": self.batch,
                "buffer": self.buffer, "run": self.run, "rows": len(self._column)}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another stream of the same rows stood; E_BAD_PARAM for one that was shuffled otherwise."""
        own = self.state_dict()
        for name in ("batch", "buffer", "run", "rows"):
            if state.get(name) != own[name]:
                raise spec_error(
                    "E_BAD_PARAM", f"state.{name}", f"is {state.get(name)!r:.40}, and here it is {own[name]}"
                )
        self.seed, self.epoch, self.taken = int(state["seed"]), int(state["epoch"]), int(state["taken"])


class _Order:
    """The order of all rows in one epoch, of which a buffer's worth is in memory: what is shuffled is no data."""

    def __init__(self, rows: int, run: int, buffer: int, seed: tuple[int, int]) -> None:
        self._rows, self._run, self._seed = rows, run, seed
        self._runs = np.random.default_rng(seed).permutation(-(-rows // run))
        self._held = max(1, buffer // run)  # runs of one buffer
        sizes = np.where(self._runs == len(self._runs) - 1, rows - run * (len(self._runs) - 1), run)
        self._starts = np.concatenate([[0], np.cumsum(sizes)])[:: self._held]
        self._buffered = lru_cache(2)(self._shuffled)

    def __getitem__(self, places: slice) -> NDArray[np.int64]:
        """The numbers of the rows at some places of the order."""
        start, stop, _ = places.indices(self._rows)
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        last = int(np.searchsorted(self._starts, stop, side="left"))
        held = np.concatenate([self._buffered(place) for place in range(first, last)])
        return held[start - int(self._starts[first]) :][: stop - start]

    def _shuffled(self, place: int) -> NDArray[np.int64]:
        runs = self._runs[place * self._held : (place + 1) * self._held]
        rows = (runs[:, None] * self._run + np.arange(self._run)).reshape(-1)
        rows = rows[rows < self._rows]
        np.random.default_rng([*self._seed, place]).shuffle(rows)
        return rows
