"""The table of architectures: what the self-test kept of a tiny random model of each, and what it refused.

The models are those of the tests (``tests/parity/architectures.py``); building and loading them all takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from _tables import table

import midstream as ms
from midstream.core.sites import SITES
from midstream.taps.locate import FAMILIES, text_config

TESTS: Final = str(Path(__file__).parents[1] / "tests")
_SUBLAYERS: Final = SITES[2:]


@dataclass(frozen=True)
class Shown:
    """One architecture: its row of the table, and, by reason, the sites that were refused."""

    cells: Sequence[str]
    refused: dict[str, list[str]]


def architectures() -> str:
    """The table, then every refusal in the words of the error."""
    if TESTS not in sys.path:
        sys.path.insert(0, TESTS)
    from parity.architectures import ARCHITECTURES  # pyright: ignore[reportMissingImports]

    rows: list[Sequence[str]] = []
    reasons: dict[tuple[str, str], list[str]] = {}
    not_loaded: list[str] = []
    for name, make in ARCHITECTURES.items():
        model = make()
        try:
            shown = _examine(name, model)
        except ms.ModelLoadError as error:
            not_loaded.append(f"- `{name}`: {error}")
            continue
        rows.append(shown.cells)
        for why, sites in shown.refused.items():
            reasons.setdefault((", ".join(sites), why), []).append(f"`{name}`")
    head = ["architecture", "`model_type`", "found by", *(f"`{site}`" for site in _SUBLAYERS), "generated rows"]
    refusals = [f"- {sites}, *{why}*: {', '.join(names)}" for (sites, why), names in reasons.items()]
    return "\n\n".join(
        [
            table(head, rows),
            "Not loaded at all:",
            "\n".join(not_loaded),
            "Refused sites, in the words of the refusal:",
            "\n".join(refusals),
        ]
    )


def _examine(name: str, model: Any) -> Shown:
    kind = text_config(model).model_type
    with ms.load(model) as lm:
        kinds, layers = lm.capabilities, lm.facts.num_layers
        cells = [_cell(lm, site, layers) if site in kinds.capture.sites else "–" for site in _SUBLAYERS]
        decoded = _decodes(lm)
    found = "list" if kind in FAMILIES else "search"
    wrapped = model.config.model_type
    shown_kind = f"`{kind}`" if wrapped == kind else f"`{kind}` in `{wrapped}`"
    refused: dict[str, list[str]] = {}
    for site in SITES:
        # that a dense model has no router is seen in the table
        if (why := kinds.refused.get(site)) and (site != "router_logits" or "gate" in why):
            refused.setdefault(why, []).append(f"`{site}`")
    return Shown([f"`{name}`", shown_kind, found, *cells, decoded], refused)


def _cell(lm: ms.LanguageModel, site: Any, layers: int) -> str:
    """`yes`, or which of the layers have the site."""
    have = lm.capture([[5]], sites=[site]).layer_ids
    return "yes" if len(have) == layers else f"layers {', '.join(map(str, have))} of {layers}"


def _decodes(lm: ms.LanguageModel) -> str:
    try:
        lm.capture([[5]], layers=[0], max_tokens=2)
    except ms.UnsupportedOperationError:
        return "refused"
    return "yes" if lm.session.taps.pads_left else "yes, by length"  # pyright: ignore[reportAttributeAccessIssue]
