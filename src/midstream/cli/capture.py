"""`midstream capture`: labelled activations of some prompts, into a file or as a table."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from . import options
from .output import counted, number, print_json, print_table, say, size, spread, table_width
from .prompt_files import GivenPrompt, given_prompts, sources_named
from .steering import Steering, given_steering, receipts_as_json

if TYPE_CHECKING:
    from midstream.core.capture import CaptureSpec
    from midstream.core.generation import GenerationParams
    from midstream.core.result import CaptureResult

Format = Literal["midstream", "vllm"]


def capture(
    model: options.Model,
    prompt: options.Prompts = None,
    prompts: options.PromptsFile = None,
    layers: options.Layers = None,
    site: options.Sites = None,
    rows: Annotated[
        str | None,
        typer.Option(
            "--rows",
            "-r",
            metavar="ROWS",
            help="Which rows, e.g. 'prompt[-1]' or 'prompt, generated, !prompt[0]'; every row if left out.",
        ),
    ] = None,
    dtype: options.StorageDtype = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="PATH", help="Where to write; without it, print a summary.")
    ] = None,
    format: Annotated[
        Format,
        typer.Option("--format", help="midstream: one capture file. vllm: a directory of vLLM's hidden-states files."),
    ] = "midstream",
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens", metavar="N", help="Tokens to generate after each prompt; 1 runs the prompts alone."
        ),
    ] = 1,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = None,
    n: options.Count = 1,
    stop: options.Stop = None,
    steer: options.Steer = None,
    strength: options.Strength = None,
    steer_layers: options.CaptureSteerLayers = None,
    steer_rows: options.CaptureSteerRows = None,
    kind: options.SteerKind = None,
    value: options.SteerValue = None,
    norm_match: options.NormMatch = False,
    no_special_tokens: options.NoSpecialTokens = False,
    model_dtype: options.ComputeDtype = "auto",
    device: options.Device = "auto",
    backend: options.Backend = "huggingface",
    engine: options.EngineOptions = None,
    base_url: options.BaseUrl = None,
    json: options.Json = False,
) -> None:
    """Capture labelled activations of prompts.

    With --out they are written to a file, which `midstream inspect` and `CaptureResult.load` read. Without it a
    table shows, for each prompt, the norm of its last selected row at each layer. With --steer, captured rows are
    the steered ones.
    """
    given = given_prompts(prompt, prompts)
    steering = given_steering(
        steer, strength=strength, layers=steer_layers, rows=steer_rows, kind=kind, value=value, norm_match=norm_match,
        prefix="--steer-",
    )  # fmt: skip
    generation = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed, "n": n, "stop": stop or ()}
    job = _Job(
        given, options.capture_spec(layers, site, rows, dtype), steering, _params(max_tokens, generation), out, format
    )
    job.check()
    from .model import opened

    with (
        opened(
            model,
            dtype=model_dtype,
            device=device,
            backend=backend,
            engine=engine,
            base_url=base_url,
            dtype_option="--model-dtype",
        ) as lm,
        sources_named(given),
        steering.named(),
    ):
        result = lm.capture(
            [one.prompt for one in given],
            layers=job.spec.layers,
            sites=job.spec.sites,
            rows=job.spec.select,
            dtype=job.spec.dtype,
            max_tokens=max_tokens,
            steering=steering.spec,
            add_special_tokens=not no_special_tokens,
            progress=True,
            **generation,
        )
    job.finish(result, as_json=json)


def _params(max_tokens: int, generation: dict[str, Any]) -> GenerationParams:
    """The generation options as GenerationParams, refused where they would change nothing."""
    from midstream.core.errors import spec_error
    from midstream.core.generation import GenerationParams

    params = GenerationParams(max_tokens=max_tokens, **generation)
    neutral = {"n": 1, "stop": ()}
    if idle := [name for name, value in generation.items() if value != neutral.get(name)]:
        option = f"--{idle[0].replace('_', '-')}"
        if max_tokens == 1:
            message = "changes nothing with --max-tokens 1, which samples no token: type for instance --max-tokens 20"
            raise spec_error("E_BAD_PARAM", option, message)
    return params


@dataclass(frozen=True)
class _Job:
    """What was asked on the command line, in the forms of core."""

    prompts: Sequence[GivenPrompt]
    spec: CaptureSpec
    steering: Steering
    params: GenerationParams
    out: Path | None
    format: Format

    def check(self) -> None:
        """Refuse, before the model loads, what could not be written at the end."""
        from midstream.core.errors import spec_error

        if self.format == "midstream":
            return options.check_out_file(self.out)
        if self.out is None:
            raise spec_error("E_BAD_PARAM", "--format", "vllm writes a directory of files: name it with --out")
        options.check_out_directory(self.out)
        if self.out.exists() and any(self.out.iterdir()):
            raise FileExistsError(f"--out {self.out} has files in it already: name a new directory, or an empty one")
        if strange := [site for site in self.spec.sites if site not in ("resid_pre", "resid_post")]:
            message = f"vLLM's hidden-states files hold no {strange[0]}; they hold: resid_pre, resid_post"
            raise spec_error("E_SITE", "--site", message)
        if self.params.n > 1:
            raise spec_error("E_BAD_PARAM", "--n", "a hidden-states file holds one continuation: type --n 1")

    def finish(self, result: CaptureResult, *, as_json: bool) -> None:
        """Write and print; exit with 1 when a prompt failed, after the others were written."""
        if self.out is not None:
            self._write(result, self.out)
        if as_json:
            print_json(_as_json(result, self.prompts, self.out) | {"steering": self.steering.as_json()})
        elif self.out is None:
            _print_summary(result)
        self.steering.report([output.steering for output in result.outputs])
        _warn_of_empty(result, self.prompts)
        for sample, error in result.errors.items():
            say(f"midstream: {self.prompts[sample].source} failed: {' '.join(str(error).split())}")
        if result.errors:
            raise typer.Exit(1)

    def _write(self, result: CaptureResult, out: Path) -> None:
        if self.format == "midstream":
            result.save(out)
            say(f"wrote {out}: {_shape(result)}, {size(out.stat().st_size)}")
        else:
            count = _write_directory(result, out)
            say(f"wrote {counted(count, 'hidden-states file')} into {out}: {_shape(result)}")


def _write_directory(result: CaptureResult, out: Path) -> int:
    """All of the hidden-states files or none: into a directory beside, which then takes the place of `out`."""
    beside = out.absolute().with_name(f".midstream-{secrets.token_hex(8)}")
    try:
        count = len(result.save_hidden_states(beside))
        os.replace(beside, out)  # an empty directory may stand there
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return count


def _shape(result: CaptureResult) -> str:
    sites = ", ".join(result.sites)
    layers = counted(len(result.layer_ids), "layer")
    return f"{counted(len(result), 'prompt')}, {counted(len(result.labels), 'row')}, {layers} of {sites}"


def _warn_of_empty(result: CaptureResult, prompts: Sequence[GivenPrompt]) -> None:
    """Say which prompts have no selected row: legal, but seldom meant."""
    empty = [index for index in range(len(result)) if index not in result.errors and not len(result.tokens(index))]
    if empty:
        names = ", ".join(prompts[index].source for index in empty[:3]) + (", …" if len(empty) > 3 else "")
        say(f"midstream: warning: --rows selected nothing in {len(empty)} of {counted(len(result), 'prompt')}: {names}")


# --- what is printed


def _last_norms(result: CaptureResult, sample: int) -> dict[tuple[str, int], float]:
    """(site, layer) → the norm of a prompt's last selected row; empty when it has none."""
    found: dict[tuple[str, int], float] = {}
    for site in result.sites:
        for layer, tensor in result.sample(sample, site).items():
            if len(tensor):
                found[site, layer] = float(tensor[-1].double().norm())
    return found


def _print_summary(result: CaptureResult) -> None:
    generated = any(output.token_ids for output in result.outputs)
    places = list(result.tensors)
    several = len(result.sites) > 1
    wide = max((len(site) for site in result.sites), default=0) + 5 if several else 8
    shown = spread(places, min(8, max(2, (table_width() - (60 if generated else 40)) // wide)))
    names = {place: f"{place[0]}.{place[1]}" if several else f"layer {place[1]}" for place in shown}
    columns = ["prompt", "tokens", "rows", *names.values(), "text", *(["generated"] if generated else [])]
    lines = [_line(result, index, shown, generated) for index in range(len(result))]
    print_table(columns, lines, words=("text", "generated") if generated else ("text",))
    if places:
        some = f" ({len(shown)} of {len(places)} are shown; --json has all)" if len(shown) < len(places) else ""
        say(f"Under each layer: the norm of the prompt's last selected row{some}. --out FILE keeps the rows.")


def _line(result: CaptureResult, index: int, shown: Sequence[Any], generated: bool) -> list[str]:
    from midstream.web.tokens import visible

    output = result.outputs[index]
    ids = output.prompt_token_ids
    text = "".join(result.decode(ids)) if result.decode else " ".join(map(str, ids))
    tail = [visible(output.text or "", 60)] if generated else []
    if index in result.errors:
        return [str(index), str(len(ids)), "failed", *([""] * len(shown)), visible(text, 60), *tail]
    norms = _last_norms(result, index)
    values = [number(norms[place]) if place in norms else "–" for place in shown]
    return [str(index), str(len(ids)), str(len(result.tokens(index))), *values, visible(text, 60), *tail]


def _as_json(result: CaptureResult, prompts: Sequence[GivenPrompt], out: Path | None) -> dict[str, Any]:
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in result.tensors.values()}
    receipt = result.receipt
    return {
        "model": result.model_ref,
        "model_fingerprint": result.model_fingerprint,
        "spec": result.spec.canonical(),
        "dtype": next(iter(dtypes), None),
        "rows": len(result.labels),
        "receipt": {
            "selected": receipt.selected,
            "computed": receipt.computed,
            "reused": receipt.reused,
            "overflowed": receipt.overflowed,
        },
        "prompts": [_prompt_json(result, index, given.source) for index, given in enumerate(prompts)],
        "out": None if out is None else str(out),
    }


def _prompt_json(result: CaptureResult, index: int, source: str) -> dict[str, Any]:
    output = result.outputs[index]
    every = output.choices or (output,)
    found: dict[str, Any] = {
        "source": source,
        "token_ids": list(output.prompt_token_ids),
        "generated": [
            {"token_ids": list(one.token_ids), "text": one.text, "finish_reason": one.finish_reason}
            for one in every
            if one.token_ids
        ],
    }
    if index in result.errors:
        return found | {"error": " ".join(str(result.errors[index]).split())}
    norms: dict[str, dict[int, float]] = {}
    for (site, layer), norm in _last_norms(result, index).items():
        norms.setdefault(site, {})[layer] = norm
    positions = result.sample_positions(index).tolist()
    return found | {"positions": positions, "last_row_norms": norms, "receipt": receipts_as_json(output.steering)}
