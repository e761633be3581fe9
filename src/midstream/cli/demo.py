"""`midstream demo`: a small real model, a capture, and a picture of it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from . import options
from .output import print_table, say, size

if TYPE_CHECKING:
    from midstream.core.result import CaptureResult
    from midstream.language_model import LanguageModel

SMOLLM2: Final = "smollm2"
_QUESTION: Final = "What is the capital of France?"
_PROMPTS: Final[tuple[tuple[str, Any], ...]] = (
    ("a fact", "The capital of France is"),
    ("another fact", "The capital of Spain is"),
    ("the fact in French", "La capitale de la France est"),
    ("code", "def add(a, b):\n    return a"),
    ("a question", "Why is the sky blue?"),
    ("a chat", [{"role": "user", "content": _QUESTION}]),
)
_LAYERS: Final = 7


def demo(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Where to write; made if it is missing.")
    ] = Path("demo"),
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="MODEL", help="A model's folder, a hub id, or smollm2 (bundled).")
    ] = SMOLLM2,
) -> None:
    """Capture from a small model and draw the result.

    Shows what midstream does, with six prompts; needs no GPU and no download. Writes acts.safetensors,
    heatmap.html and heatmap.png; run it as often as you like.
    """
    options.check_out_directory(out)
    once = " (the first time it is converted, which takes about 20 s)" if model == SMOLLM2 else ""
    say(f"1. Load {model}{once}")
    from .model import opened

    with opened(model, dtype_option="--dtype") as lm:
        facts = lm.facts
        layers = _layers(facts.num_layers)
        say(f"   {facts.model_type}, {facts.num_layers} layers of width {facts.hidden_size}, {facts.dtype}")
        say(f"2. Capture {len(_PROMPTS)} prompts at layers {', '.join(map(str, layers))}, every token")
        result = lm.capture(_prompts(lm), layers=layers, progress=True)
    out.mkdir(exist_ok=True)
    saved = result.save(out / "acts.safetensors")
    say(f"   {len(result.labels)} rows; the row of a prompt's last token is what the model answers from")
    say(f"3. Compare those last rows with the one of {_PROMPTS[0][1]!r}, layer by layer\n")
    _print_table(result, layers)
    alike = " The two capitals are alike until the last layers, where the answers part." if model == SMOLLM2 else ""
    say(f"1.00 is the same direction.{alike}\n")
    say(f"wrote {saved}: the rows and their labels, {size(saved.stat().st_size)}")
    _draw(result, out)
    _what_next(model, layers[len(layers) // 2], out)


def _layers(count: int) -> list[int]:
    """About seven layers, from the first to the last."""
    step = max(1, -(-count // _LAYERS))
    return sorted({*range(0, count, step), count - 1})


def _prompts(lm: LanguageModel) -> list[Any]:
    """The prompts; the chat as plain text for a model without a chat template."""
    chat = getattr(lm.tokenizer, "chat_template", None) is not None
    return [prompt if chat or isinstance(prompt, str) else _QUESTION for _, prompt in _PROMPTS]


def _print_table(result: CaptureResult, layers: list[int]) -> None:
    """For each prompt, the cosine of its last row with the first prompt's, at each layer."""
    import torch

    cosines = []
    for layer in layers:
        last = result.last(layer).double()
        cosines.append(torch.nn.functional.cosine_similarity(last[:1], last, dim=-1).tolist())
    rows = [
        [name, str(len(result.outputs[index].prompt_token_ids)), *(f"{of_layer[index]:.2f}" for of_layer in cosines)]
        for index, (name, _) in enumerate(_PROMPTS)
    ]
    print_table(["prompt", "tokens", *(f"layer {layer}" for layer in layers)], rows, words=("prompt",))


def _draw(result: CaptureResult, out: Path) -> None:
    from midstream.formats.atomic import replacing
    from midstream.web import heatmap_html, heatmap_png

    page = out / "heatmap.html"
    with replacing(page) as temporary:
        temporary.write_text(heatmap_html(result), encoding="utf-8")
    say(f"wrote {page}: how large each token's row is at each layer; open it in a browser")
    if find_spec("matplotlib") is None:
        say("no heatmap.png, which needs matplotlib; type: pip install 'midstream[demo]'")
    else:
        say(f"wrote {heatmap_png(result, out / 'heatmap.png')}: the same as a picture")


def _what_next(model: str, layer: int, out: Path) -> None:
    say(f"""
Next:
  midstream inspect {out / "acts.safetensors"}
  midstream capture --model {model} --prompt 'your own text' --layers {layer} --rows 'prompt[-1]'
  midstream verify --model {model}     are these numbers right?
and in Python:
  import midstream as ms
  acts = ms.CaptureResult.load("{out / "acts.safetensors"}")
  acts.last({layer})        # the last row of each prompt at layer {layer}""")
