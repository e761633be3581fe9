"""`midstream verify`: a model's captured rows beside those of a plain forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midstream.progress import token_progress

from . import options
from .output import counted, print_json, print_table, say
from .prompt_files import given_prompts, sources_named

if TYPE_CHECKING:
    from midstream.backends.huggingface.verify import SiteParity
    from midstream.core.prompts import PreparedPrompt
    from midstream.language_model import LanguageModel


def verify(
    model: options.Model,
    prompt: options.Prompts = None,
    prompts: options.PromptsFile = None,
    layers: options.Layers = None,
    site: Annotated[
        list[str] | None,
        typer.Option("--site", "-s", metavar="SITE", help=f"Some of {options.SITE_NAMES}; all if left out."),
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens", metavar="N", help="Tokens to generate after each prompt, whose rows are judged too."
        ),
    ] = 8,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help="What the model computes in; auto is its own.")
    ] = "auto",
    device: options.Device = "auto",
    backend: options.Backend = "huggingface",
    engine: options.EngineOptions = None,
    base_url: options.BaseUrl = None,
    json: options.Json = False,
) -> None:
    """Check captured rows against a plain forward pass.

    Each site and layer is compared with a plain forward pass in float32: one prompt at a time, no cache, PyTorch's
    own hooks. A row's error is the norm of the difference over the norm of the row. In a float32 model no error may
    be above 0.0001; in a bfloat16 or float16 model they may be 1.25 times those of the model run plainly, plus 0.001,
    at the 50th percentile of each layer's rows and the 99th of all of a site's. Exits with 1 when a line falls short.
    """
    ids, sites = options.layer_ids(layers), options.site_names(site)
    given = given_prompts(prompt, prompts) if prompt or prompts else []
    from .model import opened

    chosen = {"dtype": dtype, "device": device, "backend": backend, "engine": engine, "base_url": base_url}
    with opened(model, **chosen, dtype_option="--dtype") as lm, sources_named(given):
        from midstream.backends.huggingface.verify import verify as compare

        prepared = lm.prepare([one.prompt for one in given]) if given else _default_prompts(lm, max_tokens)
        with token_progress("verifying") as progress:
            found = compare(
                lm.session, prepared, lambda: _transformers_model(lm, model), _layouts(lm),
                sites=sites, layers=ids, max_tokens=max_tokens, progress=progress,
            )  # fmt: skip
        facts, refused = lm.facts, dict(lm.capabilities.refused)
    if json:
        rows = [asdict(one) | {"holds": one.holds} for one in found]
        print_json({"model": facts.model_ref, "model_fingerprint": facts.model_fingerprint, "dtype": facts.dtype,
                    "holds": all(one.holds for one in found), "parity": rows, "refused": refused})  # fmt: skip
    else:
        _print(found)
        for one, why in refused.items():
            say(f"not captured from this model: {one}, {why}")
    _conclude(found)


def _transformers_model(lm: LanguageModel, name: str) -> Any:
    """The model as transformers has it: that of the session, or, beside an engine, the same loaded here."""
    if hasattr(lm.session, "model"):
        return lm.session.model  # pyright: ignore[reportAttributeAccessIssue]
    from midstream.backends.huggingface.loading import load_pretrained

    return load_pretrained(name, dtype=lm.facts.dtype).model


def _layouts(lm: LanguageModel) -> Any:
    """Site → the layers at which the session can capture it."""
    session: Any = lm.session
    return session.taps.layouts if hasattr(session, "taps") else session.layouts


def _default_prompts(lm: LanguageModel, max_tokens: int) -> list[PreparedPrompt]:
    """Texts of different lengths, or, without a tokenizer, ids spread over the vocabulary; cut to the context."""
    if lm.tokenizer is not None:
        from .verify_prompts import TEXTS

        prepared = lm.prepare(list(TEXTS))
    else:
        vocabulary = lm.facts.vocab_size
        lengths = (1, 5, 12, 200, 320)
        prepared = lm.prepare([[(7 + 31 * place * place) % vocabulary for place in range(count)] for count in lengths])
    context = lm.facts.context_length
    room = None if context is None else max(context - max_tokens + 1, 1)
    return [replace(prompt, token_ids=prompt.token_ids[:room]) for prompt in prepared]


def _print(found: Sequence[SiteParity]) -> None:
    judged = [name for name in ("p50", "p99", "max") if any(getattr(one, f"limit_{name}") is not None for one in found)]
    columns = ["site", "layer", "cosine", "max diff"]
    for name in judged:
        columns += [f"err {name}", "limit"]
    rows: list[list[str]] = []
    for one in found:
        cells = [one.site, _layer(one), f"{one.cosine:.6f}", f"{one.difference:.1e}"]
        for name in judged:
            limit = getattr(one, f"limit_{name}")
            cells += [f"{getattr(one, f'error_{name}'):.2g}", "" if limit is None else f"{limit:.2g}"]
        rows.append([*cells, "holds" if one.holds else "SHORT"])
    print_table([*columns, ""], rows)
    say("cosine: the lowest of any row. max diff: of any value, over its row's largest value or 1.")
    percentiles = (
        "the largest" if judged == ["max"] else "at the 50th and the 99th percentile of rows, with their limits"
    )
    say(f"err: norm of a row's difference over norm of the row, {percentiles}.")


def _layer(one: SiteParity) -> str:
    return "all" if one.layer is None else str(one.layer)


def _conclude(found: Sequence[SiteParity]) -> None:
    """The sum in one line, and exit code 1 when a site falls short."""
    short = [f"{one.site} {_layer(one)}" for one in found if not one.holds]
    if not short:
        sites = counted(len({one.site for one in found}), "site")
        return say(f"all {len(found)} hold: {sites}, {counted(found[0].rows, 'row')} each")
    names = ", ".join(short[:6]) + (", …" if len(short) > 6 else "")
    say(f"midstream: {len(short)} of {len(found)} fall short of the reference: {names}")
    raise typer.Exit(1)
