"""interlens' `capture_activations`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from midstream.core.capture import CaptureSpec
from midstream.core.errors import PromptError
from midstream.core.sites import SITES, Site

_OUR_NAMES: Final[dict[str, Site]] = {"residual": "resid_post", "attn": "attn_out", "mlp": "mlp_out"}
_RESIDUALS: Final[tuple[Site, ...]] = ("resid_pre", "resid_post")


class CapturedSite(NamedTuple):
    """One activation: `tensor` `[rows, width]` at a layer and a site, the site by the name it was asked by."""

    layer: int
    site: str
    tensor: Tensor


def capture_activations(model: Any, input_ids: Any, spec: Any) -> list[CapturedSite]:
    """One forward pass over one sequence of token ids: residuals by layer, then sublayers by layer.

    model: an `lm` of `ms.load`, or a loaded transformers model. input_ids: `[1, tokens]` or `[tokens]`, a
    tensor or lists. spec: a CaptureSpec, a dict of its fields, or interlens' own spec object; the sites may
    have interlens' names (residual, attn, mlp) or ours.

    The rows differ from interlens' in two places, by intent. At the last layer `residual` is what the last
    block leaves, un-normed; interlens gives Hugging Face's `hidden_states[-1]`, after the final norm. And
    `attn` and `mlp` are what the sublayer adds to the stream: on models that norm or scale a sublayer's output
    before adding it (Gemma 2 and 3, OLMo 2, Granite) that is not the output of the module, which interlens
    gives. Tensors are ordinary ones on the CPU, whatever `offload` says. A batch of several sequences is
    refused (PromptError), where interlens keeps the first without a word; a model in training mode too.
    """
    wanted, asked = _spec(spec)
    ids = _sequence(input_ids)
    if isinstance(model, nn.Module):
        import midstream

        opened = midstream.load(model)
    else:
        opened = nullcontext(model)
    with opened as lm:
        capture = lm.capture([ids], layers=wanted.layers, sites=wanted.sites, rows=wanted.select, dtype=wanted.dtype)
    residuals = [site for site in _RESIDUALS if site in wanted.sites]
    others = [site for site in SITES if site in wanted.sites and site not in _RESIDUALS]
    return [
        CapturedSite(layer, asked[site], capture.rows(layer, site))
        for group in (residuals, others)
        for layer in capture.layer_ids
        for site in group
        if (site, layer) in capture.tensors
    ]


def _spec(spec: Any) -> tuple[CaptureSpec, dict[str, str]]:
    """The spec in our words, and the name that each site was asked by."""
    if isinstance(spec, CaptureSpec):
        return spec, {str(site): site for site in spec.sites}
    if isinstance(spec, Mapping):
        fields = {name: value for name, value in spec.items() if name != "offload"}
    else:
        fields = {name: getattr(spec, name) for name in ("sites", "layers")}
    sites = fields.get("sites", ("residual",))
    names = [sites] if isinstance(sites, str) else list(sites)
    wanted = CaptureSpec.of(fields | {"sites": [_OUR_NAMES.get(name, name) for name in names]})
    return wanted, {_OUR_NAMES.get(name, name): name for name in names}


def _sequence(input_ids: Any) -> list[int]:
    """The ids of the one sequence in `[1, tokens]` or `[tokens]`."""
    ids: Any = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids)
    if ids and isinstance(ids[0], list | tuple):
        if len(ids) > 1:
            raise PromptError(f"input_ids has {len(ids)} sequences; this takes one: use lm.capture for several")
        ids = list(ids[0])
    return ids
