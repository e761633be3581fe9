"""Tables of interventions and of generation, made from the code that they describe."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from _tables import positions_of, table

import midstream as ms
from midstream.core.errors import SpecError
from midstream.core.gates import GATE_SITES, Gate, OnlyAligned, Readout, Rule
from midstream.core.generation import CONSTRAINT_KINDS, GenerationParams
from midstream.core.interventions import OpReceipt
from midstream.core.op import Op
from midstream.core.ops import KINDS
from midstream.core.select import SelectSpec
from midstream.core.wire import Wire
from midstream.formats.vectors import read_vectors

_BASE: Final = {*Op.model_fields, "strength", "value", "angle", "mode", "on", "off", "shift"}


def _says(kind: type[Op]) -> tuple[str, str]:
    """What a kind does to a row, and its tensors, as its docstring says them."""
    first = (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")
    does, _, tensors = first.partition(". ")
    return does.rstrip("."), tensors.rstrip(".")


def _beside(kind: type[Op]) -> list[str]:
    """The optional fields that not every kind has."""
    return [f"`{name}`" for name in kind.model_fields if name not in _BASE and name not in kind.ranks]


def kinds() -> str:
    """Every kind: the row, its tensors, the sites that it acts on, and what may stand beside."""
    rows: list[Sequence[str]] = []
    for name, kind in KINDS.items():
        does, tensors = _says(kind)
        sites = ", ".join(f"`{site}`" for site in kind.kinds_sites)
        rows.append([f"`{name}`", does, tensors or "–", sites, ", ".join(_beside(kind)) or "–"])
    return table(["kind", "a row x becomes", "tensors", "sites", "may have"], rows)


def short_kinds() -> str:
    """Every kind and what it does, for the README."""
    return table(["kind", "a row x becomes"], ([f"`ms.{name}`", _says(kind)[0]] for name, kind in KINDS.items()))


SCOPES: Final[dict[str | None, str]] = {
    None: "every row (the default)",
    "prompt": "the prompt",
    "generated": "after the prompt: the first generated token stays as it is",
    "prompt[-1], generated": "every row that predicts a generated token",
    "sequence[4:]": "from position 4 on",
    "prompt[-2:]": "the last two of the prompt",
    "prompt, !prompt[0]": "the prompt without its first token",
}


def scopes() -> str:
    """The scopes of the field in the row grammar, on the example request of the semantics."""
    rows = [[f"`{text}`", meaning, positions_of(SelectSpec.read(text))] for text, meaning in SCOPES.items()]
    return table(["`rows=`", "steered are", "positions"], rows)


def _fields(model: type[Wire], without: Sequence[str] = ()) -> str:
    """The fields of a model with what they are when left out."""
    found: list[str] = []
    for name, field in model.model_fields.items():
        if name in without:
            continue
        found.append(f"`{name}`" if field.is_required() or field.default is None else f"`{name}` ({field.default!r})")
    return ", ".join(found)


def gate_parts() -> str:
    """The parts of a gate and their fields, defaults in brackets."""
    rows = [
        ["gate", _fields(Gate), (inspect.getdoc(Gate) or "").split("\n")[0]],
        ["readout", _fields(Readout), _first(Readout)],
        ["rule", _fields(Rule), _first(Rule)],
    ]
    return table(["part", "fields", "what"], rows)


def only_aligned() -> str:
    """The fields of the modifier, and what it does."""
    return f"{_fields(OnlyAligned)}: {_first(OnlyAligned).removeprefix('A modifier: ')}"


def _first(model: type[Any]) -> str:
    return (inspect.getdoc(model) or "").split("\n\n")[0].replace("\n", " ")


def gate_sites() -> str:
    """The sites whose rows a gate may read."""
    return ", ".join(f"`{site}`" for site in GATE_SITES)


def receipt_fields() -> str:
    """The fields of a receipt."""
    return ", ".join(f"`{name}`" for name in OpReceipt.__dataclass_fields__)


REFUSED: Final[dict[str, Callable[[], Any]]] = {
    "ms.add([1.0, 2.0])": lambda: ms.add([1.0, 2.0]),
    "ms.add(v, layers=[3], strength=float('nan'))": lambda: ms.add([1.0], layers=[3], strength=float("nan")),
    "ms.ablate(d, layers=[3], strength=2)": lambda: ms.ablate([1.0], layers=[3], strength=2),
    "ms.clamp([0.0, 0.0], layers=[3], value=0)": lambda: ms.clamp([0.0, 0.0], layers=[3], value=0),
    "ms.rotate([[1, 0], [2, 0]], layers=[3], angle=1)": lambda: ms.rotate([[1, 0], [2, 0]], layers=[3], angle=1),
    "ms.add(v, layers=[3], site='head_out')": lambda: ms.add([1.0], layers=[3], site="head_out"),
    "ms.add(v, layers=[3], site='mlp_out', norm_match=True)": lambda: ms.add(
        [1.0], layers=[3], site="mlp_out", norm_match=True
    ),
    "ms.add([[1.0]], layers=[3], positions=[-1])": lambda: ms.add([[1.0]], layers=[3], positions=[-1]),
    "ms.add(v, layers=[3], rows='prompt', gate=gate)": lambda: ms.add(
        [1.0],
        layers=[3],
        rows="prompt",
        gate={"layers": [1], "readout": {"kind": "cosine", "d": [1.0]}, "rule": {"kind": "sum"}},
    ),
    "ms.InterventionSpec.read([{'kind': 'multiply'}])": lambda: ms.InterventionSpec.read([{"kind": "multiply"}]),
}


def refusals() -> str:
    """What is refused without a model, with the message."""
    rows: list[Sequence[str]] = []
    for text, call in REFUSED.items():
        try:
            call()
        except SpecError as error:
            rows.append([f"`{text}`", str(error)])
        else:
            raise AssertionError(f"{text} is not refused")
    return table(["asked", "refused with"], rows)


def vector_formats() -> str:
    """The formats that `read_vectors` tells apart, as the head of its module lists them."""
    text = inspect.getdoc(inspect.getmodule(read_vectors)) or ""
    lines = re.findall(r"^(ours|GGUF|vllm-lens) +(.+(?:\n {8,}.+)*)", text, re.MULTILINE)
    suffixes = {"ours": "`.safetensors`", "GGUF": "`.gguf`", "vllm-lens": "`.json`"}
    return table(
        ["suffix", "format", "what it holds"],
        ([suffixes[name], name, " ".join(words.split())] for name, words in lines),
    )


PARAMS: Final[dict[str, str]] = {
    "max_tokens": "tokens of each continuation",
    "min_tokens": "EOS, stop tokens and stop strings do not end it before",
    "temperature": "0 is greedy; 1 where only another field asks for sampling",
    "top_p": "the likeliest tokens that hold this much of the probability",
    "top_k": "this many likeliest tokens",
    "repetition_penalty": "tokens that were there, in the prompt too, get less likely above 1",
    "greedy": "True takes the likeliest token, False samples, whatever else is given",
    "n": "continuations of each prompt",
    "seed": "see below",
    "seed_scope": "see below",
    "stop": "texts that end a continuation",
    "stop_token_ids": "ids that end it",
    "ignore_eos": "the model's EOS ids do not end it",
    "logprobs": "each sampled token's log-probability, and this many likeliest in its place",
    "prompt_logprobs": "the same of the prompt's tokens",
    "constraint": "structured output, see below",
    "extra": "arguments of the model's own `generate`, see below",
}
assert tuple(PARAMS) == tuple(GenerationParams.model_fields)


def generation_params() -> str:
    """Every field of GenerationParams, what it is when unset, and what it means."""
    rows: list[Sequence[str]] = []
    for name, field in GenerationParams.model_fields.items():
        default = field.get_default(call_default_factory=True)
        rows.append([f"`{name}`", "–" if default in (None, (), {}) else f"`{default}`", PARAMS[name]])
    return table(["field", "unset", "meaning"], rows)


def captured_params() -> str:
    """The fields that a capture takes."""
    return ", ".join(f"`{name}`" for name in GenerationParams.model_fields if name != "extra")


CONSTRAINTS: Final[dict[str, str]] = {
    "json_schema": "a JSON Schema, as a dict or as text; the text is compact JSON, properties in the schema's order",
    "regex": "a pattern that the whole text matches",
    "grammar": "a grammar in GBNF, from its rule `root`",
    "choice": "a list of texts, one of which comes",
}
assert tuple(CONSTRAINTS) == CONSTRAINT_KINDS


def constraints() -> str:
    """The kinds of constraints."""
    return table(["constraint", "what"], ([f"`{name}`", words] for name, words in CONSTRAINTS.items()))
