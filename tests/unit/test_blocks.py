"""Pages that results are lent, and that come back when they are gone."""

from __future__ import annotations

import copy
import gc
import io

import pytest
import torch

from midstream.taps.blocks import LARGE, Blocks

SHAPE = (3000, 577)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float64])
def test_a_large_tensor_is_an_ordinary_one(dtype: torch.dtype) -> None:
    blocks = Blocks()
    with torch.inference_mode():
        pass
    made = blocks.tensor(SHAPE, dtype)
    assert (made.shape, made.dtype, made.is_contiguous(), made.is_inference()) == (SHAPE, dtype, True, False)
    assert made.untyped_storage().nbytes() == made.numel() * made.itemsize
    values = torch.arange(SHAPE[0])[:, None].expand(SHAPE).to(dtype)
    made.copy_(values)
    assert torch.equal(made, values)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), values)
    assert torch.equal(copy.deepcopy(made), values)
    if dtype == torch.float32:
        made.requires_grad_().sum().backward()
        assert made.grad is not None


def test_pages_come_back_when_the_last_view_is_gone() -> None:
    blocks = Blocks()
    made = blocks.tensor(SHAPE, torch.float32)
    place, view = made.data_ptr(), made[5]
    view.fill_(1.5)
    del made
    gc.collect()
    assert blocks.free_bytes == 0
    other = blocks.tensor(SHAPE, torch.float32)
    assert other.data_ptr() != place
    other.zero_()
    assert view.unique().tolist() == [1.5]
    del view
    assert blocks.free_bytes > 0
    again = blocks.tensor((SHAPE[0] - 1, SHAPE[1]), torch.float32)
    assert again.data_ptr() == place
    assert blocks.free_bytes == 0


def test_no_more_is_kept_than_was_said() -> None:
    blocks = Blocks(kept_bytes=20 << 20)
    for _ in range(3):
        made = [blocks.tensor((size << 18,), torch.float32) for size in (4, 9, 30)]
        del made
        assert blocks.free_bytes <= 20 << 20


def test_pages_that_are_much_too_large_are_not_lent() -> None:
    blocks = Blocks()
    del blocks  # nothing of an empty one is left behind
    blocks = Blocks()
    large = blocks.tensor((100 << 18,), torch.float32)
    del large
    small = blocks.tensor((LARGE // 4,), torch.float32)
    assert blocks.free_bytes > 100 << 20
    assert len(small) == LARGE // 4
