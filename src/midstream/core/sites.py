"""Sites and layer sets (docs/semantics.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from .errors import choices, spec_error
from .narrow import is_int, plain

Site = Literal["resid_pre", "resid_post", "attn_out", "mlp_out", "head_out", "router_logits", "q", "k"]
SITES: Final[tuple[Site, ...]] = get_args(Site)

OTHER_NAMES: Final[dict[str, str]] = {
    "layer_input": "resid_pre",
    "residual": "resid_post",
    "layer_output": "resid_post",
    "hidden_states": "resid_post",
    "attn": "attn_out",
    "mlp": "mlp_out",
    "attention_heads": "head_out",
    "output_qk": "q' and 'k",
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
    if not isinstance(name, str):
        raise spec_error("E_SITE", path, f"a site is a name, got {name!r:.60}; there are: {choices(SITES)}")
    if name in SITES:
        return name
    if name in OTHER_NAMES:
        raise spec_error("E_SITE", path, f"no site {name!r}: here it is called '{OTHER_NAMES[name]}'")
    raise spec_error("E_SITE", path, f"no site {name!r}; there are: {choices(SITES)}")


def layer_set(layers: Any, available: Sequence[int], path: str = "layers", what: str = "the model") -> tuple[int, ...]:
    """Layer ids, sorted, each once; `None` is all of `available`.

    Raises E_LAYER_RANGE for an empty list and for a negative, boolean or absent id, naming the range.

    >>> layer_set([3, 1, 3], range(4))
    (1, 3)
    """
    if layers is None:
        return tuple(available)
    return layer_ids(layers, path, f"{what} has {_span(available)}", available)


def layer_ids(
    layers: Any,
    path: str = "layers",
    exist: str = "layers are counted from 0",
    available: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Layer ids (or one), sorted, each once; `available` None where no model is known yet.

    Raises E_LAYER_RANGE for what can be no layer, or is none of `available`, saying what there is (`exist`).

    >>> layer_ids([3, 1, 3])
    (1, 3)
    """
    layers = plain(layers)
    several = hasattr(layers, "__iter__") and not isinstance(layers, str)
    given = list(layers) if several else [layers]
    if not given:
        raise spec_error("E_LAYER_RANGE", path, f"an empty list of layers; {exist}")
    for place, layer in enumerate(given):
        if not is_int(layer) or not 0 <= layer < 1 << 31 or (available is not None and layer not in available):
            shown = f"{layer!r:.40}" if not is_int(layer) or abs(layer) < 1 << 128 else "of that size"
            what = f"no layer {shown}" + ("" if is_int(layer) else ", which is no integer")
            raise spec_error("E_LAYER_RANGE", f"{path}[{place}]" if several else path, f"{what}; {exist}")
    return tuple(sorted({int(layer) for layer in given}))


def aux_place(aux: int) -> tuple[Site, int]:
    """Where the stream after `aux` blocks stands, which is what vLLM numbers so (aux layer ids).

    >>> aux_place(0), aux_place(30)
    (('resid_pre', 0), ('resid_post', 29))
    """
    return ("resid_post", aux - 1) if aux else ("resid_pre", 0)


def layouts_at(
    sites: Mapping[Site, Sequence[int]], layouts: Mapping[Site, Mapping[int, SiteLayout]]
) -> dict[Site, dict[int, SiteLayout]]:
    """The layouts of some sites at some of their layers."""
    return {site: {layer: layouts[site][layer] for layer in of} for site, of in sites.items()}


def layers_at(
    site: Site,
    layouts: Mapping[Site, Mapping[int, SiteLayout]],
    refused: Mapping[Site, str],
    path: str = "sites",
) -> tuple[int, ...]:
    """The layers at which a model has a site; E_SITE, with the reason, when there is none."""
    if not layouts.get(site):
        why, have = refused.get(site, "the architecture has none"), choices(tuple(layouts))
        raise spec_error("E_SITE", path, f"this model has no {site}: {why}; it has: {have}")
    return tuple(layouts[site])


def site_layers(
    sites: Sequence[Site],
    layers: Any,
    layouts: Mapping[Site, Mapping[int, SiteLayout]],
    refused: Mapping[Site, str],
    path: str = "sites",
) -> dict[Site, tuple[int, ...]]:
    """Each site's layers, checked against a model: E_SITE, at `path`, and E_LAYER_RANGE name what there is."""
    return {
        site: layer_set(layers, layers_at(site, layouts, refused, path), "capture.layers", f"{site} of this model")
        for site in sites
    }


def _span(available: Sequence[int]) -> str:
    """The layers that exist, in words."""
    ids = list(available)
    if not ids:
        return "none"
    if ids == list(range(ids[0], ids[-1] + 1)):
        return f"layers {ids[0]} to {ids[-1]}" if len(ids) > 1 else f"layer {ids[0]} alone"
    return "layers " + ", ".join(map(str, ids))
