"""Sites and layer sets (SEMANTICS.md, "Layers" and "Sites")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from .errors import choices, spec_error
from .narrow import is_int

Site = Literal["resid_pre", "resid_post", "attn_out", "mlp_out", "head_out", "router_logits", "q", "k"]
SITES: Final[tuple[Site, ...]] = get_args(Site)

_OTHER_NAMES: Final[dict[str, Site]] = {
    "layer_input": "resid_pre",
    "residual": "resid_post",
    "layer_output": "resid_post",
    "hidden_states": "resid_post",
    "attn": "attn_out",
    "mlp": "mlp_out",
    "attention_heads": "head_out",
}


@dataclass(frozen=True)
class SiteLayout:
    """The width of a site's rows; for sites made of heads, how many there are and how wide each is."""

    width: int
    heads: int | None = None
    head_size: int | None = None


def as_site(name: Any, path: str = "site") -> Site:
    """`name` as a Site, or E_SITE; a name of another tool is answered with ours.

    >>> as_site("resid_post")
    'resid_post'
    """
    if name in SITES:
        return name
    if name in _OTHER_NAMES:
        raise spec_error("E_SITE", path, f"no site {name!r}: here it is called {_OTHER_NAMES[name]!r}")
    raise spec_error("E_SITE", path, f"no site {name!r}; there are: {choices(SITES)}")


def layer_set(layers: Any, available: Sequence[int], path: str = "layers", what: str = "the model") -> tuple[int, ...]:
    """Layer ids, sorted, each once; `None` is all of `available`.

    Raises E_LAYER_RANGE for an empty list and for a negative, boolean or absent id, naming the range.

    >>> layer_set([3, 1, 3], range(4))
    (1, 3)
    """
    if layers is None:
        return tuple(available)
    given: list[Any] = list(layers) if hasattr(layers, "__iter__") and not isinstance(layers, str) else [layers]
    if not given:
        raise spec_error("E_LAYER_RANGE", path, f"an empty list of layers; {what} has {_span(available)}")
    found: set[int] = set()
    for place, layer in enumerate(given):
        if not is_int(layer) or layer not in available:
            message = f"no layer {layer!r}; {what} has {_span(available)}"
            raise spec_error("E_LAYER_RANGE", f"{path}[{place}]", message)
        found.add(int(layer))
    return tuple(sorted(found))


def _span(available: Sequence[int]) -> str:
    """The layers that exist, in words."""
    ids = list(available)
    if not ids:
        return "none"
    if ids == list(range(ids[0], ids[-1] + 1)):
        return f"layers {ids[0]} to {ids[-1]}" if len(ids) > 1 else f"layer {ids[0]} alone"
    return "layers " + ", ".join(map(str, ids))
