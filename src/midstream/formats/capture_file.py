"""The capture file: one CaptureResult as one .safetensors (docs/formats.md).

Tensors `<site>.<layer>` `[rows, width]`; `labels.sample|choice|position|token_id` int64 and `labels.phase`
uint8 (0 prompt, 1 generation) `[rows]`; `prompts.ids` `[all prompt tokens]` and `prompts.offsets`
`[prompts + 1]`, int64: prompt i is `ids[offsets[i]:offsets[i + 1]]`. One JSON text under the metadata key
`midstream` holds the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from midstream.core.capture import CaptureReceipt, CaptureSpec, Labels
from midstream.core.errors import CaptureError, FileFormatError, MidstreamError, SpecError
from midstream.core.generation import Completion, FinishReason, TokenLogprob
from midstream.core.interventions import OpReceipt
from midstream.core.result import CaptureResult
from midstream.core.sites import Site, SiteLayout
from midstream.core.wire import Int, Wire

from .tensor_file import DTYPES, opened, owned, read_json, write

FORMAT: Final = 1
KEY: Final = "midstream"
_WHAT: Final = "a capture file"
LABELS: Final = ("sample", "choice", "position", "token_id", "phase")
_OTHERS: Final = (*(f"labels.{name}" for name in LABELS), "prompts.ids", "prompts.offsets")


class _Choice(Wire):
    """What a Completion holds besides its prompt's ids."""

    token_ids: tuple[Int, ...] = ()
    text: str | None = None
    finish_reason: FinishReason | None = None
    receipt: CaptureReceipt | None = None
    steering: tuple[OpReceipt, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


class _Output(_Choice):
    choices: tuple[_Choice, ...] = ()


class _Metadata(Wire):
    """The JSON text of a capture file; `errors` sample → message, `tokens` token id → its text."""

    root: ClassVar[str] = KEY

    format: Int
    model_ref: str
    model_fingerprint: str
    spec: dict[str, Any]
    receipt: CaptureReceipt
    layouts: dict[Site, dict[int, SiteLayout]]
    outputs: tuple[_Output, ...]
    errors: dict[int, str]
    tokens: dict[int, str] | None
    steering: tuple[dict[str, Any] | None, ...] = ()


@dataclass(frozen=True)
class CaptureFileHeader:
    """What a capture file says of itself, read without its rows.

    bytes: the file's size. rows, samples: their numbers. shapes, dtypes: `<site>.<layer>` → `(rows, width)`
    and the type's name. layouts, spec, receipt: as in the CaptureResult. errors: sample → message.
    """

    path: Path
    format: int
    bytes: int
    rows: int
    samples: int
    sites: tuple[Site, ...]
    layers: tuple[int, ...]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    layouts: Mapping[Site, Mapping[int, SiteLayout]]
    spec: CaptureSpec
    receipt: CaptureReceipt
    model_ref: str
    model_fingerprint: str
    errors: Mapping[int, str]


@dataclass(frozen=True)
class StoredTexts:
    """`CaptureResult.decode` of a loaded file: it knows the tokens that occur in the file, and no others."""

    texts: Mapping[int, str]

    def __call__(self, token_ids: Sequence[int]) -> list[str]:
        """Token ids → the text of each."""
        try:
            return [self.texts[token_id] for token_id in token_ids]
        except KeyError as error:
            raise CaptureError(
                f"no text for token {error.args[0]}: a loaded capture knows the tokens that occur in it; "
                "use the model's tokenizer"
            ) from None


# --- writing


def save(result: CaptureResult, path: str | PathLike[str]) -> Path:
    """Write the capture file, atomically; `load` gives the same result back, bit for bit.

    Texts are kept for the tokens that occur. Raises OSError in one line (missing directory, no right, full
    disk) with the old file untouched, FileFormatError when the texts are too large for one file, and
    CaptureError for rows without labels.
    """
    if not result.labelled:
        raise CaptureError("these rows have no labels (a file without token ids): a capture file needs them")
    tensors = {f"{site}.{layer}": tensor for (site, layer), tensor in result.tensors.items()}
    return write(path, tensors | label_tensors(result), {KEY: _metadata(result)})


def label_tensors(result: CaptureResult) -> dict[str, Tensor]:
    """The labels of a capture's rows, and its prompts, under the names of the file."""
    tensors = {f"labels.{name}": torch.tensor(getattr(result.labels, name), dtype=torch.int64) for name in LABELS[:-1]}
    tensors["labels.phase"] = torch.tensor(result.labels.generated, dtype=torch.uint8)
    prompts = [output.prompt_token_ids for output in result.outputs]
    tensors["prompts.ids"] = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int64)
    tensors["prompts.offsets"] = torch.tensor([0, *accumulate(map(len, prompts))], dtype=torch.int64)
    return tensors


def _metadata(result: CaptureResult) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "model_ref": result.model_ref,
        "model_fingerprint": result.model_fingerprint,
        "spec": result.spec.canonical(),
        "receipt": asdict(result.receipt),
        "layouts": {
            site: {layer: asdict(layout) for layer, layout in layers.items()} for site, layers in result.layouts.items()
        },
        "outputs": [_output(output) for output in result.outputs],
        "errors": {sample: " ".join(str(error).split()) for sample, error in result.errors.items()},
        "tokens": _texts(result),
        "steering": list(result.steering),
    }


def _output(output: Completion) -> dict[str, Any]:
    one = {
        "token_ids": list(output.token_ids),
        "text": output.text,
        "finish_reason": output.finish_reason,
        "receipt": asdict(output.receipt) if output.receipt else None,
        "steering": [asdict(receipt) for receipt in output.steering],
        "logprobs": _logprobs(output.logprobs),
        "prompt_logprobs": _logprobs(output.prompt_logprobs),
    }
    return one | {"choices": [_output(choice) for choice in output.choices]} if output.choices else one


def _logprobs(given: Sequence[TokenLogprob | None] | None) -> list[Any] | None:
    return None if given is None else [None if one is None else asdict(one) for one in given]


def _texts(result: CaptureResult) -> dict[int, str] | None:
    """The text of each token that occurs in a prompt, an output or a label."""
    if result.decode is None:
        return None
    ids = set(np.unique(result.labels.token_id).tolist())
    for output in result.outputs:
        ids.update(output.prompt_token_ids, output.token_ids, *(choice.token_ids for choice in output.choices))
    ordered = sorted(ids)
    return dict(zip(ordered, result.decode(ordered), strict=True))


# --- reading


def read_header(path: str | PathLike[str]) -> CaptureFileHeader:
    """What stands in the file, without its rows: cheap for a file of any size.

    Raises as `load` does, for all that can be seen without the rows.
    """
    with opened(path, _WHAT) as file:
        metadata, spec, places = _checked(file, path)
        slices = {f"{site}.{layer}": file.get_slice(f"{site}.{layer}") for site, layer in places}
        (rows,) = file.get_slice("labels.sample").get_shape()
        return CaptureFileHeader(
            path=Path(path),
            format=metadata.format,
            bytes=Path(path).stat().st_size,
            rows=rows,
            samples=len(metadata.outputs),
            sites=tuple(metadata.layouts),
            layers=tuple(sorted({layer for _, layer in places})),
            shapes={name: tuple(one.get_shape()) for name, one in slices.items()},
            dtypes={name: str(DTYPES[one.get_dtype()]).removeprefix("torch.") for name, one in slices.items()},
            layouts=metadata.layouts,
            spec=spec,
            receipt=metadata.receipt,
            model_ref=metadata.model_ref,
            model_fingerprint=metadata.model_fingerprint,
            errors=metadata.errors,
        )


def load(path: str | PathLike[str]) -> CaptureResult:
    """Read a capture file; its tensors are ordinary and own their memory.

    Errors of samples come back as CaptureErrors with their message; `decode` knows the tokens that occur.
    Raises FileNotFoundError, and FileFormatError in one line that names the file: not a capture file, a newer
    format, truncated, or parts that do not fit each other.
    """
    with opened(path, _WHAT) as file:
        metadata, spec, places = _checked(file, path)
        tensors: dict[tuple[Site, int], Tensor] = {
            (site, layer): owned(file, f"{site}.{layer}") for site, layer in places
        }
        columns = {name: owned(file, f"labels.{name}").numpy() for name in LABELS}
        ids, offsets = owned(file, "prompts.ids"), owned(file, "prompts.offsets")
    labels = _labels(columns, len(metadata.outputs), path)
    errors: dict[int, MidstreamError] = {sample: CaptureError(text) for sample, text in metadata.errors.items()}
    return CaptureResult(
        labels=labels,
        tensors=tensors,
        layouts=metadata.layouts,
        outputs=_completions(metadata.outputs, ids, offsets, path),
        receipt=metadata.receipt,
        spec=spec,
        model_ref=metadata.model_ref,
        model_fingerprint=metadata.model_fingerprint,
        errors=errors,
        decode=None if metadata.tokens is None else StoredTexts(metadata.tokens),
        steering=metadata.steering,
    )


def _checked(file: Any, path: str | PathLike[str]) -> tuple[_Metadata, CaptureSpec, list[tuple[Site, int]]]:
    """The metadata, the spec and the (site, layer)s of an opened file, when all its parts fit each other."""
    names = set(file.keys())
    metadata, spec = _read_metadata(file, names, path)
    if missing := sorted(set(_OTHERS) - names):
        raise FileFormatError(f"{path}: it has no tensor {missing[0]}")
    rows, shapes = file.get_slice("labels.sample").get_shape(), {}
    for name in _OTHERS:
        one = file.get_slice(name)
        dtype = "U8" if name == "labels.phase" else "I64"
        shapes[name] = one.get_shape()
        if one.get_dtype() != dtype or len(shapes[name]) != 1:
            raise FileFormatError(f"{path}: {name} is {one.get_dtype()} {shapes[name]}, not {dtype} of one dimension")
        if name.startswith("labels.") and shapes[name] != rows:
            raise FileFormatError(f"{path}: {name} has {shapes[name][0]} labels, labels.sample has {rows[0]}")
    if shapes["prompts.offsets"] != [len(metadata.outputs) + 1]:
        raise FileFormatError(f"{path}: {shapes['prompts.offsets'][0]} offsets for {len(metadata.outputs)} prompts")
    places: list[tuple[Site, int]] = []
    for site, layers in metadata.layouts.items():
        for layer in sorted(layers):
            if (name := f"{site}.{layer}") in names:
                _check_tensor(file.get_slice(name), name, [*rows, layers[layer].width], path)
                places.append((site, layer))
    if strange := sorted(names - set(_OTHERS) - {f"{site}.{layer}" for site, layer in places}):
        raise FileFormatError(f"{path}: it has a tensor {strange[0]!r} that its layouts do not name")
    return metadata, spec, places


def _check_tensor(one: Any, name: str, shape: list[int], path: str | PathLike[str]) -> None:
    if one.get_shape() != shape:
        raise FileFormatError(f"{path}: {name} is {one.get_shape()}; its labels and layout say {shape}")
    if one.get_dtype() not in DTYPES:
        raise FileFormatError(f"{path}: {name} is of type {one.get_dtype()}; there are: {', '.join(DTYPES)}")


def _read_metadata(file: Any, names: set[str], path: str | PathLike[str]) -> tuple[_Metadata, CaptureSpec]:
    found = read_json(file, KEY, path)
    if found is None:
        hint = ""
        if "hidden_states" in names:
            hint = ": it is a hidden-states file, read it with midstream.formats.hidden_states_file.read"
        raise FileFormatError(f"{path} is a safetensors file but not a capture file{hint}")
    version = found.get("format")
    if version != FORMAT:
        newer = isinstance(version, int) and version > FORMAT
        advice = ": install a newer midstream" if newer else ""
        raise FileFormatError(f"{path} has the capture format {version!r:.40}; this midstream reads {FORMAT}{advice}")
    try:
        metadata = _Metadata.of(found)
        return metadata, CaptureSpec.of(metadata.spec, f"{KEY}.spec")
    except SpecError as error:
        raise FileFormatError(f"{path}: its metadata is damaged: {error}") from None


def _labels(columns: Mapping[str, Any], samples: int, path: str | PathLike[str]) -> Labels:
    """The label table, when its samples are in order and exist."""
    sample, phase = columns["sample"], columns["phase"]
    if len(sample) and (sample[0] < 0 or sample[-1] >= samples or (np.diff(sample) < 0).any()):
        raise FileFormatError(f"{path}: labels.sample is not in order within 0 to {samples - 1}")
    if (phase > 1).any():
        raise FileFormatError(f"{path}: labels.phase holds {phase.max()}; there are: 0 prompt, 1 generation")
    return Labels(sample, columns["choice"], columns["position"], columns["token_id"], phase == 1)


def _completions(
    outputs: Sequence[_Output], ids: Tensor, offsets: Tensor, path: str | PathLike[str]
) -> tuple[Completion, ...]:
    bounds: list[int] = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] != len(ids) or sorted(bounds) != bounds:
        raise FileFormatError(f"{path}: prompts.offsets does not rise from 0 to the {len(ids)} ids in prompts.ids")
    tokens: list[int] = ids.tolist()
    completions: list[Completion] = []
    for place, output in enumerate(outputs):
        prompt = tuple(tokens[bounds[place] : bounds[place + 1]])
        choices = tuple(_completion(prompt, choice) for choice in output.choices)
        completions.append(_completion(prompt, output, choices))
    return tuple(completions)


def _completion(prompt: tuple[int, ...], one: _Choice, choices: tuple[Completion, ...] = ()) -> Completion:
    return Completion(
        prompt,
        one.token_ids,
        one.text,
        one.finish_reason,
        one.receipt,
        choices,
        one.steering,
        one.logprobs,
        one.prompt_logprobs,
    )
