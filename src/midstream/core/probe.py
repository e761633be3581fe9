"""A linear probe: what a row is projected onto, at one layer and site."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .artifacts import Artifact, Floats, finite_array
from .errors import spec_error
from .narrow import is_int
from .sites import Site, as_site

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Probe:
    """A direction with a bias: row x scores x·weight + bias, in float32.

    layer: a block's id. weight: `[width]` of the site, from an array, a tensor or a list. name: what its scores are
    called; its place if it has none. Raises E_LAYER_RANGE, E_SITE or E_BAD_PARAM.

    >>> import torch
    >>> Probe(12, "resid_post", [0.0, 2.0], bias=1.0).score(torch.tensor([[3.0, 4.0]])).tolist()
    [9.0]
    """

    layer: int
    site: Site
    weight: Floats
    bias: float = 0.0
    name: str | None = None

    def __init__(self, layer: int, site: Any, weight: Any, bias: float = 0.0, name: str | None = None) -> None:
        if not is_int(layer) or layer < 0:
            raise spec_error("E_LAYER_RANGE", "layer", f"no layer {layer!r:.40}; layers are counted from 0")
        array = finite_array(weight, "weight")
        if array.ndim != 1:
            raise spec_error(
                "E_BAD_PARAM", "weight", f"is of shape {list(array.shape)}: a probe has one vector, [width]"
            )
        if not np.isfinite(np.float32(bias)):
            raise spec_error("E_BAD_PARAM", "bias", f"must be a finite number, got {bias!r:.40}")
        for field, value in (("layer", int(layer)), ("site", as_site(site, "site")), ("weight", array),
                             ("bias", float(bias)), ("name", name)):  # fmt: skip
            object.__setattr__(self, field, value)

    @property
    def title(self) -> str:
        """What its scores are called: its name, else its place."""
        return self.name or f"{self.site}.{self.layer}"

    def score(self, rows: Tensor) -> Tensor:
        """The score of each row: `[rows, width]` → `[rows]`, float32."""
        import torch

        if rows.shape[-1] != len(self.weight):
            message = f"has {len(self.weight)} values, and {self.site} at layer {self.layer} has {rows.shape[-1]}"
            raise spec_error("E_BAD_PARAM", "weight", message)
        return rows.float() @ torch.tensor(self.weight) + self.bias

    def described(self) -> dict[str, Any]:
        """What tells it from another, in JSON."""
        identity = Artifact.of(self.weight).id
        return {"name": self.title, "layer": self.layer, "site": self.site, "weight": identity, "bias": self.bias}
