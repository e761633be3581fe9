"""`midstream score`: how likely a model finds given texts after given prompts, steered or not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midstream.core.errors import PromptError
from midstream.progress import token_progress

from . import options
from .output import counted, print_json, print_table, save_json, say
from .prompt_files import GivenPrompt, given_prompts, sources_named
from .steering import Steering, given_steering

if TYPE_CHECKING:
    from midstream.core.prompts import PreparedPrompt
    from midstream.language_model import LanguageModel


def score(
    model: options.Model,
    prompt: options.Prompts = None,
    prompts: options.PromptsFile = None,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            "--reference",
            metavar="TEXT",
            help="What comes after the prompt, often with a space in front. Give it again for more: all of one prompt, "
            "or one for each prompt. In a .jsonl file, records have their own reference, as text or token ids.",
        ),
    ] = None,
    steer: options.Steer = None,
    strength: options.Strength = None,
    layers: options.SteerLayers = None,
    rows: options.SteerRows = None,
    kind: options.SteerKind = None,
    value: options.SteerValue = None,
    norm_match: options.NormMatch = False,
    no_special_tokens: options.NoSpecialTokens = False,
    dtype: options.ModelDtype = "auto",
    device: options.Device = "auto",
    backend: options.Backend = "huggingface",
    engine: options.EngineOptions = None,
    base_url: options.BaseUrl = None,
    out: options.JsonFile = None,
    json: options.Json = False,
) -> None:
    """Score references: the log-probability of each of their tokens.

    Each reference stands after its prompt as if the model had said it: no token is sampled. The sum is the
    log-probability of the whole reference. With --steer the rows of the reference are generated rows.
    """
    pairs = _pairs(given_prompts(prompt, prompts), reference or ())
    steering = given_steering(
        steer, strength=strength, layers=layers, rows=rows, kind=kind, value=value, norm_match=norm_match
    )
    options.check_out_file(out, example="scores.json")
    from .model import opened

    with opened(
        model, dtype=dtype, device=device, backend=backend, engine=engine, base_url=base_url, dtype_option="--dtype"
    ) as lm:
        scored = _scored(lm, pairs, steering, add_special_tokens=not no_special_tokens)
        facts = lm.facts
        found = {
            "model": facts.model_ref,
            "model_fingerprint": facts.model_fingerprint,
            "dtype": facts.dtype,
            "steering": steering.as_json(),
            "scores": [one.as_json() for one in scored],
            "out": None if out is None else str(out),
        }
    if json:
        print_json(found)
    elif out is None:
        _print(scored)
    if out is not None:
        save_json(out, found)
        say(f"wrote {out}: {counted(len(scored), 'score')}")


@dataclass(frozen=True)
class _Pair:
    """A prompt, a reference after it, and where that was given."""

    prompt: GivenPrompt
    reference: Any
    source: str


def _pairs(prompts: Sequence[GivenPrompt], words: Sequence[str]) -> list[_Pair]:
    """Each prompt with its reference, or the one prompt with each of them; PromptError where that is not clear."""
    if not words:
        return [_Pair(one, _own_reference(one), one.source) for one in prompts]
    if own := [one for one in prompts if one.reference is not None]:
        raise PromptError(f"{own[0].source} has its own reference: leave out --reference")
    references = [(word, f"--reference {place}") for place, word in enumerate(words, 1)]
    for word, source in references:
        if not word:
            raise PromptError(f"{source} is empty: give some text")
    if len(prompts) == 1:
        prompts = [prompts[0]] * len(references)
    elif len(references) == 1:
        references = references * len(prompts)
    if len(prompts) != len(references):
        message = f"{counted(len(prompts), 'prompt')} and {counted(len(references), 'reference')}"
        raise PromptError(f"{message}: give one reference for each prompt, one for all, or one prompt for all")
    return [_Pair(one, word, source) for one, (word, source) in zip(prompts, references, strict=True)]


def _own_reference(prompt: GivenPrompt) -> Any:
    found = prompt.reference
    if found is None:
        raise PromptError(f"{prompt.source} has no reference: give --reference TEXT, or a record with a reference")
    ids = isinstance(found, list) and all(type(item) is int for item in found)
    if not found or not (ids or isinstance(found, str)):
        raise PromptError(f"{prompt.source}: reference is {found!r:.60}, which is neither some text nor token ids")
    return found


@dataclass(frozen=True)
class _Scored:
    """One reference with the log-probability of each of its tokens."""

    pair: _Pair
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    texts: Sequence[str] | None
    logprobs: Sequence[float]

    @property
    def sum(self) -> float:
        """The log-probability of the whole reference."""
        return sum(self.logprobs)

    def as_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "prompt": self.pair.prompt.source,
            "reference": self.pair.source,
            "prompt_token_ids": list(self.prompt_token_ids),
            "token_ids": list(self.token_ids),
            "texts": None if self.texts is None else list(self.texts),
            "logprobs": list(self.logprobs),
            "sum": self.sum,
        }


def _scored(
    lm: LanguageModel, pairs: Sequence[_Pair], steering: Steering, *, add_special_tokens: bool
) -> list[_Scored]:
    """The pairs scored, in order: `lm.score` takes references of one length, so each length is one call."""
    from midstream.core.prompts import reference_ids

    with _named(pairs):
        prepared = lm.prepare([pair.prompt.prompt for pair in pairs], add_special_tokens=add_special_tokens)
        ids = reference_ids([pair.reference for pair in pairs], len(pairs), lm.tokenizer)
    logprobs = _by_length(lm, pairs, prepared, ids, steering)
    tokenizer = lm.tokenizer
    return [
        _Scored(
            pair,
            prepared[place].token_ids,
            ids[place],
            None if tokenizer is None else [tokenizer.decode([token]) for token in ids[place]],
            logprobs[place],
        )
        for place, pair in enumerate(pairs)
    ]


@contextmanager
def _named(pairs: Sequence[_Pair]) -> Iterator[None]:
    """While open, a PromptError that begins with a prompt's or a reference's index says where that was given."""
    try:
        with sources_named([pair.prompt for pair in pairs]):
            yield
    except PromptError as error:
        match = re.match(r"reference (\d+)", str(error))
        if match is None or int(match[1]) >= len(pairs):
            raise
        raise PromptError(f"{pairs[int(match[1])].source}: the reference{str(error)[match.end() :]}") from error


def _by_length(
    lm: LanguageModel,
    pairs: Sequence[_Pair],
    prepared: Sequence[PreparedPrompt],
    ids: Sequence[Sequence[int]],
    steering: Steering,
) -> dict[int, list[float]]:
    """Place of a pair → the log-probabilities of its reference."""
    groups: dict[int, list[int]] = {}
    for place, reference in enumerate(ids):
        groups.setdefault(len(reference), []).append(place)
    sizes = [len(prompt.token_ids) + len(reference) for prompt, reference in zip(prepared, ids, strict=True)]
    found: dict[int, list[float]] = {}
    with token_progress("scoring") as progress, steering.named():
        for places in groups.values():
            before = sum(sizes[place] for place in found)
            with _named([pairs[place] for place in places]):
                scores = lm.score(
                    [prepared[place] for place in places],
                    [ids[place] for place in places],
                    steering=steering.spec,
                    progress=lambda done, _, before=before: progress(before + done, sum(sizes)),
                )
            found |= dict(zip(places, scores.tolist(), strict=True))
    return found


def _print(scored: Sequence[_Scored]) -> None:
    from midstream.web.tokens import visible

    rows: list[list[str]] = []
    for one in scored:
        texts = [visible(text) for text in one.texts] if one.texts is not None else [str(i) for i in one.token_ids]
        each = "  ".join(f"{text} {logprob:.3f}" for text, logprob in zip(texts, one.logprobs, strict=True))
        said = one.pair.reference if isinstance(one.pair.reference, str) else "".join(one.texts or ())
        rows.append([one.pair.prompt.source, str(len(one.token_ids)), f"{one.sum:.4f}", visible(said, 60), each])
    print_table(["prompt", "tokens", "sum", "reference", "each token"], rows, words=("reference", "each token"))
    say("sum: the log-probability of the whole reference, in nats. --json has all figures in full.")
