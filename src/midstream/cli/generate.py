"""`midstream generate`: what a model says after some prompts, steered or not."""

from __future__ import annotations

import json as _json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midstream.progress import token_progress

from . import options
from .output import counted, print_json, print_table, save_json, say
from .prompt_files import GivenPrompt, given_prompts, sources_named
from .steering import Steering, given_steering, receipts_as_json

if TYPE_CHECKING:
    from midstream.core.errors import MidstreamError
    from midstream.core.generation import Completion, GenerationParams, TokenLogprob
    from midstream.language_model import LanguageModel


def generate(
    model: options.Model,
    prompt: options.Prompts = None,
    prompts: options.PromptsFile = None,
    steer: options.Steer = None,
    strength: options.Strength = None,
    layers: options.SteerLayers = None,
    rows: options.SteerRows = None,
    kind: options.SteerKind = None,
    value: options.SteerValue = None,
    norm_match: options.NormMatch = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", help="Tokens of each continuation.")] = 40,
    min_tokens: Annotated[int, typer.Option("--min-tokens", metavar="N", help="Do not end before this many.")] = 0,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    repetition_penalty: Annotated[
        float | None, typer.Option("--repetition-penalty", metavar="X", help="Above 1, say less of what was there.")
    ] = None,
    seed: options.Seed = None,
    n: options.Count = 1,
    stop: options.Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end of text.")] = False,
    json_schema: Annotated[
        str | None,
        typer.Option("--json-schema", metavar="FILE", help="Text that a JSON Schema (or its text) describes."),
    ] = None,
    regex: Annotated[
        str | None, typer.Option("--regex", metavar="PATTERN", help="Text that matches this as a whole.")
    ] = None,
    grammar: Annotated[
        Path | None, typer.Option("--grammar", metavar="FILE", help="Text of a grammar in GBNF, from its rule root.")
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option("--choice", metavar="TEXT", help="One of these texts; give it again for more.")
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option("--logprobs", metavar="N", help="Also each token's log-probability, and the N likeliest there."),
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text of one prompt as it comes.")] = False,
    no_special_tokens: options.NoSpecialTokens = False,
    dtype: options.ModelDtype = "auto",
    device: options.Device = "auto",
    backend: options.Backend = "huggingface",
    engine: options.EngineOptions = None,
    base_url: options.BaseUrl = None,
    out: options.JsonFile = None,
    json: options.Json = False,
) -> None:
    """Generate text, steered or not.

    Prints what comes after each prompt; greedy unless --temperature, --top-p, --top-k or --seed is given. With
    --steer, a table on stderr says how many rows each op changed at each layer, and by how much of their norm.
    """
    given = given_prompts(prompt, prompts)
    steering = given_steering(
        steer, strength=strength, layers=layers, rows=rows, kind=kind, value=value, norm_match=norm_match
    )
    fields = {
        "min_tokens": min_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k,
        "repetition_penalty": repetition_penalty, "seed": seed, "n": n, "stop": stop or (), "ignore_eos": ignore_eos,
        "logprobs": logprobs, "constraint": _constraint(json_schema, regex, grammar, choice),
    }  # fmt: skip
    job = _Job(given, steering, _params(max_tokens, fields), not no_special_tokens)
    options.check_out_file(out, example="said.json")
    if stream:
        job.check_stream(as_json=json)
    from .model import opened

    with opened(
        model, dtype=dtype, device=device, backend=backend, engine=engine, base_url=base_url, dtype_option="--dtype"
    ) as lm:
        with sources_named(given), steering.named():
            done = job.stream(lm) if stream else job.run(lm)
        found = done.as_json(job, lm, out)
        if json:
            print_json(found)
        elif out is None or stream:
            done.print(job, lm, texts=not stream)
    if out is not None:
        save_json(out, found)
        say(f"wrote {out}: {counted(len(done.every), 'continuation')}")
    done.conclude(job)


def _params(max_tokens: int, fields: Mapping[str, Any]) -> GenerationParams:
    from midstream.core.generation import GenerationParams

    return GenerationParams(max_tokens=max_tokens, **fields)


def _constraint(
    json_schema: str | None, regex: str | None, grammar: Path | None, choice: Sequence[str] | None
) -> dict[str, Any] | None:
    """The one constraint that was given, or None."""
    from midstream.core.errors import spec_error

    given: dict[str, Any] = {"json_schema": json_schema, "regex": regex, "grammar": grammar, "choice": choice or None}
    named = [name for name, value in given.items() if value is not None]
    if not named:
        return None
    first, *others = (f"--{name.replace('_', '-')}" for name in named)
    if others:
        raise spec_error("E_CONSTRAINT", others[0], f"beside {first}: one constraint at a time, drop one of them")
    (name,) = named
    if name == "json_schema":
        return {name: _schema(given[name])}
    return {name: _text_of(grammar, first) if grammar is not None else given[name]}


def _schema(text: str) -> Any:
    """A JSON Schema from a file, or from its own text, which begins with a brace."""
    from midstream.core.errors import spec_error

    inline = text.lstrip().startswith("{")
    try:
        return _json.loads(text if inline else _text_of(Path(text), "--json-schema"))
    except (ValueError, RecursionError) as error:
        where = "its text" if inline else text
        raise spec_error("E_CONSTRAINT", "--json-schema", f"{where} is not JSON: {error}") from None


def _text_of(path: Path, option: str) -> str:
    if path.is_dir():
        raise IsADirectoryError(f"{option} {path} is a directory: name a file in it")
    if not path.exists():
        raise FileNotFoundError(f"{option} {path}: there is no such file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        from midstream.core.errors import FileFormatError

        raise FileFormatError(f"{option} {path} is not UTF-8 text: {error.reason} at byte {error.start + 1}") from None


@dataclass(frozen=True)
class _Job:
    """What was asked on the command line, in the forms of core."""

    prompts: Sequence[GivenPrompt]
    steering: Steering
    params: GenerationParams
    add_special_tokens: bool

    def check_stream(self, *, as_json: bool) -> None:
        """Refuse, before the model loads, what cannot be streamed."""
        from midstream.core.errors import spec_error

        if as_json:
            message = "prints text as it comes, and --json one object at the end: --out FILE keeps the object"
            raise spec_error("E_BAD_PARAM", "--stream", message)
        if len(self.prompts) > 1:
            raise spec_error("E_BAD_PARAM", "--stream", f"takes one prompt, and there are {len(self.prompts)}")
        if self.params.n > 1:
            raise spec_error("E_BAD_PARAM", "--stream", f"takes one continuation, and --n is {self.params.n}")

    def run(self, lm: LanguageModel) -> _Done:
        """Every prompt; those that fail alone are kept apart."""
        from midstream.core.errors import PartialBatchError

        try:
            with token_progress("generating") as progress:
                found = lm.generate([one.prompt for one in self.prompts], progress=progress, **self._named())
        except PartialBatchError as error:
            return _Done(error.completions, error.failures)
        return _Done(dict(enumerate(found)), {})

    def stream(self, lm: LanguageModel) -> _Done:
        """The one prompt, its text to stdout as it comes."""
        last: Completion | None = None
        began = False
        try:
            for chunk in lm.stream(self.prompts[0].prompt, **self._named()):
                ids = "".join(f"{token} " for token in chunk.token_ids)
                sys.stdout.write(ids if lm.tokenizer is None else chunk.text)
                sys.stdout.flush()
                began, last = True, chunk.completion
        finally:
            if began:
                sys.stdout.write("\n")
        assert last is not None, "the last chunk has the completion"
        return _Done({0: last}, {})

    def _named(self) -> dict[str, Any]:
        """What `lm.generate` and `lm.stream` take beside prompts."""
        fields = {name: getattr(self.params, name) for name in self.params.model_fields_set}
        return fields | {"steering": self.steering.spec, "add_special_tokens": self.add_special_tokens}


@dataclass(frozen=True)
class _Done:
    """What came of the prompts, by index."""

    found: Mapping[int, Completion]
    failures: Mapping[int, MidstreamError]

    @property
    def every(self) -> list[Completion]:
        """Every continuation of every prompt."""
        return [one for output in self.found.values() for one in output.choices or (output,)]

    def print(self, job: _Job, lm: LanguageModel, *, texts: bool) -> None:
        """The texts, and the log-probabilities that were asked for, to stdout."""
        several = len(job.prompts) > 1 or job.params.n > 1
        for index, output in sorted(self.found.items()):
            for place, one in enumerate(output.choices or (output,)):
                if several:
                    which = f", continuation {place}" if job.params.n > 1 else ""
                    typer.echo(f"--- {job.prompts[index].source}{which} ({one.finish_reason})")
                if texts:
                    typer.echo(" ".join(map(str, one.token_ids)) if one.text is None else one.text)
                if one.logprobs is not None:
                    _print_logprobs(one.logprobs, _decoder(lm))

    def conclude(self, job: _Job) -> None:
        """How continuations ended, what the ops did, and which prompts failed, on stderr; exit with 1 if some did."""
        ended = Counter(str(one.finish_reason) for one in self.every)
        tokens = sum(len(one.token_ids) for one in self.every)
        reasons = ", ".join(f"{count} by {reason}" for reason, count in ended.most_common())
        if self.every:
            say(f"{counted(len(self.every), 'continuation')}, {counted(tokens, 'token')}; ended: {reasons}")
        job.steering.report([output.steering for output in self.found.values()])
        for index, error in sorted(self.failures.items()):
            say(f"midstream: {job.prompts[index].source} failed: {' '.join(str(error).split())}")
        if self.failures:
            raise typer.Exit(1)

    def as_json(self, job: _Job, lm: LanguageModel, out: Path | None) -> dict[str, Any]:
        """All of it as plain data."""
        from midstream.core.interventions import receipts_together

        facts = lm.facts
        return {
            "model": facts.model_ref,
            "model_fingerprint": facts.model_fingerprint,
            "dtype": facts.dtype,
            "params": job.params.model_dump(mode="json", exclude_defaults=True) | {"max_tokens": job.params.max_tokens},
            "steering": job.steering.as_json(),
            "receipt": receipts_as_json(receipts_together(output.steering for output in self.found.values())),
            "prompts": [self._prompt_json(index, one.source, lm) for index, one in enumerate(job.prompts)],
            "out": None if out is None else str(out),
        }

    def _prompt_json(self, index: int, source: str, lm: LanguageModel) -> dict[str, Any]:
        if index in self.failures:
            return {"source": source, "error": " ".join(str(self.failures[index]).split())}
        output = self.found[index]
        return {
            "source": source,
            "token_ids": list(output.prompt_token_ids),
            "receipt": receipts_as_json(output.steering),
            "generated": [_continuation_json(one, lm) for one in output.choices or (output,)],
        }


Decode = Callable[[int], str | None]


def _decoder(lm: LanguageModel) -> Decode:
    """A token's id → its text; None without a tokenizer."""
    tokenizer = lm.tokenizer
    return lambda token: None if tokenizer is None else tokenizer.decode([token])


def _continuation_json(one: Completion, lm: LanguageModel) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": one.text,
        "token_ids": list(one.token_ids),
        "finish_reason": one.finish_reason,
    }
    if one.logprobs is None:
        return found
    decode = _decoder(lm)
    tokens = [
        {
            "token_id": token.token_id,
            "text": decode(token.token_id),
            "logprob": token.logprob,
            "top": [{"token_id": i, "text": decode(i), "logprob": logprob} for i, logprob in token.top],
        }
        for token in one.logprobs
    ]
    return found | {"logprobs": tokens}


def _print_logprobs(logprobs: Sequence[TokenLogprob], decode: Decode) -> None:
    from midstream.web.tokens import visible

    def shown(token: int) -> str:
        text = decode(token)
        return str(token) if text is None else visible(text)

    rows = [
        [shown(one.token_id), f"{one.logprob:.4f}", "  ".join(f"{shown(i)} {logprob:.4f}" for i, logprob in one.top)]
        for one in logprobs
    ]
    if any(one.top for one in logprobs):
        print_table(["token", "log-probability", "likeliest there"], rows, words=("likeliest there",))
    else:
        print_table(["token", "log-probability"], [row[:2] for row in rows])
