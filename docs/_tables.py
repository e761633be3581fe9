"""Tables of sites, rows and families, made from the code that they describe."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from midstream.core.capture import STORAGE_DTYPES
from midstream.core.errors import SpecError
from midstream.core.select import SelectSpec, resolve
from midstream.core.sites import SITES, Site, as_site
from midstream.taps.locate import FAMILIES
from midstream.taps.step import whole_sequence


@dataclass(frozen=True)
class SiteWords:
    """What the code does not say of a site: its meaning, and what others call it."""

    what: str
    width: str
    transformers: str = "–"
    transformer_lens: str = "–"
    vllm: str = "–"


WORDS: Final[dict[Site, SiteWords]] = {
    "resid_pre": SiteWords("what block l reads", "hidden", "`hidden_states[l]`", "`hook_resid_pre`", "aux id l"),
    "resid_post": SiteWords(
        "what block l leaves, before any final norm",
        "hidden",
        "`hidden_states[l+1]`, except at the last block",
        "`hook_resid_post`",
        "aux id l+1",
    ),
    "attn_out": SiteWords(
        "what attention adds to the stream: after a post-norm or a multiplier, where the block has one",
        "hidden",
        transformer_lens="`hook_attn_out`",
    ),
    "mlp_out": SiteWords(
        "what the MLP, or the experts together, add to the stream, likewise",
        "hidden",
        transformer_lens="`hook_mlp_out`",
    ),
    "head_out": SiteWords(
        "what each query head gives, before the output projection",
        "query heads × head value size",
        transformer_lens="`attn.hook_z`, heads side by side",
    ),
    "router_logits": SiteWords("the logits of the gate over the experts, before any softmax", "experts"),
    "q": SiteWords(
        "queries as attention takes them: after rotary embedding and head norms",
        "query heads × head size",
        transformer_lens="`attn.hook_rot_q`, heads side by side",
    ),
    "k": SiteWords(
        "keys, likewise, without those of earlier tokens",
        "key-value heads × head size",
        transformer_lens="`attn.hook_rot_k`, heads side by side",
    ),
}
assert tuple(WORDS) == SITES

OTHERS: Final = (
    "layer_input", "layer_output", "residual", "hidden_states", "attn", "mlp", "attention_heads", "output_qk",
)  # fmt: skip
"""Names of other tools for a site; asking by one is refused with our name for it."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


# --- sites and families


def sites() -> str:
    """Every site with what it is and how wide."""
    return table(["site", "what", "width"], ([f"`{site}`", words.what, words.width] for site, words in WORDS.items()))


def site_names() -> str:
    """Every site with its equivalents."""
    return table(
        ["site, at block l", "transformers", "TransformerLens, block l", "vLLM"],
        ([f"`{site}`", words.transformers, words.transformer_lens, words.vllm] for site, words in WORDS.items()),
    )


def other_names() -> str:
    """What asking for a site by another tool's name is answered with."""
    answers: list[Sequence[str]] = []
    for name in OTHERS:
        try:
            as_site(name)
        except SpecError as error:
            answers.append([f"`{name}`", error.message])
    return table(["asked", "answer"], answers)


def families() -> str:
    """The listed families, by `model_type`."""
    return ", ".join(f"`{name}`" for name in FAMILIES)


# --- rows

PROMPT: Final = (1, 40, 41, 40, 42)
GENERATED: Final = (50, 51, 52, 2)
"""The request of the tables: 5 prompt tokens, 4 generated, the last of which no pass consumes."""


def example_request() -> str:
    """The request whose rows the grammar table shows."""
    ids = [*PROMPT, *GENERATED[:-1]]
    phases = ["prompt"] * len(PROMPT) + ["generation"] * (len(GENERATED) - 1)
    return table(
        ["position", *map(str, range(len(ids)))],
        [["token id", *map(str, ids)], ["phase", *phases]],
    )


EXAMPLES: Final[dict[str | None, str]] = {
    None: "every row (the default)",
    "prompt": "every prompt row",
    "generated": "every generated row",
    "sequence": "both, as `prompt, generated`",
    "prompt[-1]": "the last prompt row, which predicts the first generated token",
    "prompt[0:2]": "a half-open window of the prompt",
    "prompt[-2:]": "negative ends count from the end of the prompt",
    "generated[0]": "the row that consumes the first generated token",
    "generated[1:]": "an open window of what was generated",
    "sequence[4:6]": "absolute positions, whatever the phase",
    "prompt{40,42}": "prompt rows whose token id is listed",
    "prompt, generated, !prompt[0]": "terms are joined by commas; `!` excludes",
    "prompt, !prompt{40}": "a whole prompt without one token",
    "prompt[99]": "a position that is not there: no row, and no other in its place",
}
SHORT: Final = (
    "prompt[-1]",
    "prompt[0:2]",
    "generated",
    "sequence[4:6]",
    "prompt{40,42}",
    "prompt, generated, !prompt[0]",
)


def row_grammar() -> str:
    """Grammar, meaning, object and rows of the example request."""
    lines: list[Sequence[str]] = []
    for text, meaning in EXAMPLES.items():
        spec = SelectSpec.read(text)
        as_object = "–" if spec is None else f"`{json.dumps(spec.canonical())}`"
        lines.append([f"`{text}`", meaning, as_object, positions_of(spec)])
    return table(["`rows=`", "meaning", "the same as an object", "positions"], lines)


def short_grammar() -> str:
    """Grammar and meaning of a few, for the README."""
    return table(["`rows=`", "meaning"], ([f"`{text}`", EXAMPLES[text]] for text in SHORT))


def positions_of(spec: SelectSpec | None) -> str:
    """The positions of the example request that `spec` selects."""
    request = whole_sequence([*PROMPT, *GENERATED[:-1]], len(PROMPT))
    return ", ".join(map(str, np.flatnonzero(resolve(spec, request)).tolist())) or "none"


def row_refusals() -> str:
    """What is refused when it is read, with the message."""
    refused: tuple[str | dict[str, object], ...] = (
        {},
        {"prompt_positions": []},
        "prompt[5:2]",
        "generated[-1]",
        "prompt, !generated[0]",
        "prompt, !prompt",
        "prompt[last]",
        {"prompts": "all"},
    )
    rows: list[Sequence[str]] = []
    for value in refused:
        try:
            SelectSpec.read(value, "rows")  # pyright: ignore[reportArgumentType]
        except SpecError as error:
            rows.append([f"`{value}`", str(error).split("; there are: ")[0]])
        else:
            raise AssertionError(f"{value!r} is not refused")
    return table(["`rows=`", "refused with"], rows)


# --- parameters


def storage_dtypes() -> str:
    """The storage types."""
    return ", ".join(f"`{name}`" for name in STORAGE_DTYPES)


def server_limits() -> str:
    """The limits of a server: what each is, and unless told otherwise."""
    from midstream.server.settings import Limits

    rows = [
        (f"`{name}`", field.description or "", _figure(field.default)) for name, field in Limits.model_fields.items()
    ]
    return table(("Limit", "What", "Unless given"), rows)


def _figure(value: float) -> str:
    """A number with a unit where it is a power of two, else as it is."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if isinstance(value, int) and value % size == 0 and value >= size and value != 33_554_432:
            return f"{value // size} {unit}"
    return f"{value:,g}" if isinstance(value, float) else f"{value:,}"


def server_routes() -> str:
    """The routes of a server, and the first line of what each says of itself."""
    from midstream.server.routes import activations, artifacts, completions, files, jobs, models, usage

    rows: list[tuple[str, str]] = []
    for part in (completions, models, artifacts, activations, files, jobs, usage):
        for route in part.router.routes:
            if route.path.startswith("/v1/midstream/artifacts"):
                continue  # the same as /v1/artifacts
            methods = ", ".join(sorted(route.methods - {"HEAD"} or route.methods))
            rows.append((f"`{methods} {route.path}`", (route.description or "").split("\n")[0]))
    return table(("Route", "What"), rows)
