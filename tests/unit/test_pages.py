"""Pages that results are lent, and that come back when they are gone."""

from __future__ import annotations

import copy
import gc
import io

import pytest
import torch

from midstream.taps.pages import LARGE, Pages

SHAPE = (3000, 577)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float64])
def test_a_large_tensor_is_an_ordinary_one(dtype: torch.dtype) -> None:
    pages = Pages()
    made = pages.tensor(SHAPE, dtype)
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
    pages = Pages()
    made = pages.tensor(SHAPE, torch.float32)
    place, view = made.data_ptr(), made[5]
    view.fill_(1.5)
    del made
    gc.collect()
    assert pages.free_bytes == 0
    other = pages.tensor(SHAPE, torch.float32)
    assert other.data_ptr() != place
    other.zero_()
    assert view.unique().tolist() == [1.5]
    del view
    assert pages.free_bytes > 0
    again = pages.tensor((SHAPE[0] - 1, SHAPE[1]), torch.float32)
    assert again.data_ptr() == place
    assert pages.free_bytes == 0


def test_no_more_is_kept_than_was_said() -> None:
    pages = Pages(kept_bytes=20 << 20)
    for _ in range(3):
        made = [pages.tensor((size << 18,), torch.float32) for size in (4, 9, 30)]
        del made
        assert pages.free_bytes <= 20 << 20


def test_pages_that_are_much_too_large_are_not_lent() -> None:
    pages = Pages()
    # nothing of an empty one is left behind
    pages = Pages()
    large = pages.tensor((100 << 18,), torch.float32)
    del large
    small = pages.tensor((LARGE // 4,), torch.float32)
    assert pages.free_bytes > 100 << 20
    assert len(small) == LARGE // 4
