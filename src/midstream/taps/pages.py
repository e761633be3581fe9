"""Memory for results, apart from the heap that a model's own tensors come from.

Results come and go with every call. From the heap, malloc would give back its top each time, and fetch it again page by
page under the next pass's temporaries; from new pages each time, the system would clear them first. On a CPU either
costs more than the copy of the rows. So large results are in pages of their own, which are used again.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress
from math import prod
from typing import Final

import torch
from torch import Tensor

LARGE: Final = 1 << 20
"""From this size on a result has pages of its own."""
KEPT_BYTES: Final = 1 << 29
"""Of pages whose results are gone, kept for the next ones."""
_HUGE: Final = 1 << 21


class Pages:
    """Pages that are lent to tensors, in any thread. kept_bytes: of those that came back, how many stay."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self.kept_bytes = kept_bytes
        self._free: list[mmap.mmap] = []

    @property
    def free_bytes(self) -> int:
        """What waits for the next results."""
        return sum(map(len, self._free))

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An ordinary tensor of undefined values; its pages come back when its storage is gone.

        >>> Pages().tensor((2, 3), torch.bfloat16).shape
        torch.Size([2, 3])
        """
        count = prod(shape)
        nbytes = count * dtype.itemsize
        if nbytes < LARGE:
            return torch.empty(shape, dtype=dtype)
        pages = self._pages(nbytes)
        lent = memoryview(pages)
        weakref.finalize(lent, self._give_back, pages).atexit = False
        start = -torch.frombuffer(lent, dtype=torch.uint8).data_ptr() % _HUGE  # huge pages begin at their multiples
        return torch.frombuffer(lent, dtype=dtype, count=count, offset=start).view(shape)

    def give_up(self) -> None:
        """What waits for the next results goes back to the system.

        >>> pages = Pages()
        >>> _ = pages.tensor((1 << 20,), torch.float32)
        >>> pages.give_up()
        >>> pages.free_bytes
        0
        """
        self._free.clear()

    def _pages(self, nbytes: int) -> mmap.mmap:
        """Some that are free and not much too large, or new ones."""
        size = -(-nbytes // _HUGE) * _HUGE + _HUGE
        while fitting := [one for one in self._free if size <= len(one) <= size + size // 4]:
            found = min(fitting, key=len)
            with suppress(ValueError):  # another thread was faster
                self._free.remove(found)
                return found
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        return pages

    def _give_back(self, pages: mmap.mmap) -> None:
        self._free.append(pages)
        while self.free_bytes > self.kept_bytes:
            with suppress(IndexError):
                self._free.pop(0)


PAGES: Final = Pages()
"""Those of this process."""
