"""The rows at a place of an engine, as a Stream."""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false

from __future__ import annotations

import torch
from torch import Tensor

from midstream.taps.stream import Fused, Index, Stream

from .places import Place


def stream_at(place: Place, delta: Tensor, residual: Tensor | None, *, whole: bool = False) -> Stream:
    """What stands at a place; the Transformers backend has an axis more. whole: heads of all ranks, side by side."""
    rows = delta.view(-1, delta.shape[-1])
    beside = None if residual is None else residual.view(-1, residual.shape[-1])
    stream: Stream = Fused(rows, beside)
    if place.scale != 1.0:
        stream = Scaled(stream, place.scale)
    if whole and place.site == "head_out":
        stream = Gathered(stream, delta.shape[-1])
    return stream


class _Over:
    """A stream that shows another in its own way."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    @property
    def size(self) -> int:
        """How many flat rows there are."""
        return self._stream.size

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._stream.device

    @property
    def dtype(self) -> torch.dtype:
        """What a row is made of."""
        return self._stream.dtype


class Scaled(_Over):
    """What a block multiplies by a number before it joins the stream, as it joins."""

    def __init__(self, stream: Stream, scale: float) -> None:
        super().__init__(stream)
        self._scale = scale

    def take(self, index: Index) -> Tensor:
        """Some rows, multiplied."""
        return self._stream.take(index) * self._scale

    def copy(self, index: Index, out: Tensor) -> None:
        """Write some rows, multiplied, to `out`."""
        torch.mul(self._stream.take(index), self._scale, out=out)

    def put(self, index: Index, rows: Tensor) -> None:
        """Change some rows, so that multiplied they are `rows`."""
        self._stream.put(index, rows / self._scale)


class Gathered(_Over):
    """Rows of which each tensor-parallel rank has a part, side by side in the order of the ranks.

    Every rank takes the same rows at the same time, for they all follow one schedule.
    """

    def __init__(self, stream: Stream, width: int) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        super().__init__(stream)
        self._ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        self._mine = slice(rank * width, (rank + 1) * width)

    def take(self, index: Index) -> Tensor:
        """Some rows, whole."""
        from vllm.distributed import tensor_model_parallel_all_gather

        part = self._stream.take(index)
        return part if self._ranks == 1 else tensor_model_parallel_all_gather(part.contiguous(), -1)

    def copy(self, index: Index, out: Tensor) -> None:
        """Write some rows, whole, to `out`."""
        out.copy_(self.take(index))

    def put(self, index: Index, rows: Tensor) -> None:
        """Change this rank's part of some rows."""
        self._stream.put(index, rows[:, self._mine])
