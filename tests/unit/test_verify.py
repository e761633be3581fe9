"""The verdict of `midstream verify`, on rows made by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from midstream.backends.huggingface.verify import ACROSS, ALLOWANCE, FACTOR, SiteParity, compare, judge
from midstream.core.errors import CaptureError


def rows(count: int = 200, width: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * 10


def off_by(want: Tensor, error: float, seed: int = 1) -> Tensor:
    """`want` with a difference of `error` times each row's norm."""
    noise = rows(len(want), want.shape[1], seed).double()
    return want.double() + noise * (error * want.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True))


def verdict(got: Tensor, want: Tensor, plain: Tensor | None = None) -> SiteParity:
    return judge("resid_post", 3, [compare(got, want, plain)])


def test_equal_rows_hold_with_nothing_to_spare() -> None:
    found = verdict(rows(), rows())
    assert found == SiteParity("resid_post", 3, 200, found.cosine, 0.0, 0.0, 0.0, 0.0, None, None, ACROSS)
    assert found.cosine == pytest.approx(1.0)
    assert found.holds


def test_the_numbers_are_what_they_say() -> None:
    want = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 2000.0]])
    got = torch.tensor([[3.0, 4.5], [0.3, 0.4], [0.0, 2001.0]])
    found = verdict(got, want)
    assert found.difference == pytest.approx(0.5 / 4)
    assert found.error_max == pytest.approx(0.5 / 5)
    assert found.error_p50 == pytest.approx(1 / 2000)
    assert found.cosine == pytest.approx((3 * 3 + 4 * 4.5) / (5 * math.hypot(3, 4.5)))
    small = verdict(torch.tensor([[0.0, 0.01]]), torch.tensor([[0.0, 0.02]]))
    assert small.difference == pytest.approx(0.01)  # over one, where the row's largest value is less


def test_in_float32_every_row_counts() -> None:
    want = rows()
    assert verdict(off_by(want, 0.9 * ACROSS), want).holds
    one = want.double().clone()
    one[7] = off_by(want, 1.1 * ACROSS)[7]
    found = verdict(one, want)
    assert not found.holds
    assert found.error_p99 == 0


@pytest.mark.parametrize(("error", "holds"), [(0.01, True), (0.0134, True), (0.0136, False), (0.5, False)])
def test_shorter_types_are_judged_by_the_plain_models_distance(error: float, holds: bool) -> None:
    want = rows()
    found = verdict(off_by(want, error), want, off_by(want, 0.01, seed=2))
    assert found.limit_p50 == pytest.approx(FACTOR * 0.01 + ALLOWANCE)
    assert found.limit_p99 == pytest.approx(FACTOR * 0.01 + ALLOWANCE)
    assert found.limit_max is None
    assert found.holds is holds


def test_shorter_types_forgive_one_row_in_a_hundred_but_not_three() -> None:
    want = rows()
    plain = off_by(want, 0.01, seed=2)
    for wrong, holds in ((1, True), (6, False)):
        got = off_by(want, 0.01)
        got[:wrong] = off_by(want, 0.9)[:wrong]
        assert verdict(got, want, plain).holds is holds


def test_half_of_the_rows_a_little_off_falls_short_at_the_median() -> None:
    want = rows()
    got, plain = off_by(want, 0.02), off_by(want, 0.01, seed=2)
    plain[:20] = off_by(want, 0.9, seed=3)[:20]  # the percentile at the top is generous
    found = verdict(got, want, plain)
    assert found.limit_p99 is not None
    assert found.error_p99 < found.limit_p99
    assert not found.holds


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("shorter", [False, True])
def test_what_is_not_finite_never_holds(value: float, shorter: bool) -> None:
    want = rows()
    got = want.clone()
    got[5, 2] = value
    assert not verdict(got, want, want if shorter else None).holds
    assert not verdict(want, got, want if shorter else None).holds


def test_rows_of_zeros() -> None:
    nothing = torch.zeros(3, 4)
    found = verdict(nothing, nothing)
    assert found.holds
    assert found.cosine == 1.0
    assert not verdict(torch.ones(3, 4), nothing).holds


def test_other_shapes_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"captured rows \[199, 16\] where the reference has \[200, 16\]"):
        compare(rows()[1:], rows())
    with pytest.raises(CaptureError, match="reference"):
        compare(rows(), rows(), rows()[:, :8])


def test_parts_are_judged_together() -> None:
    want = rows()
    got = off_by(want, 0.01)
    parts = [compare(got[:50], want[:50]), compare(got[50:], want[50:])]
    assert judge("q", 0, parts).error_p50 == pytest.approx(judge("q", 0, [compare(got, want)]).error_p50)
    assert judge("q", 0, parts).rows == 200


def test_without_the_tail_only_the_median_is_judged() -> None:
    want = rows()
    plain, got = off_by(want, 0.01, seed=2), off_by(want, 0.01)
    got[:6] = off_by(want, 0.9)[:6]
    found = judge("q", 0, [compare(got, want, plain)], tail=False)
    assert (found.limit_p99, found.holds) == (None, True)
    assert not judge("q", None, [compare(got, want, plain)]).holds
