"""Options that several commands share, and how their lists are read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from midstream.core.capture import CaptureSpec
    from midstream.core.sites import Site

Model = Annotated[
    str,
    typer.Option("--model", "-m", metavar="MODEL", help="A model's folder, a hub id, or smollm2 (bundled)."),
]
Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda, cuda:0, …; auto takes a GPU where there is one.")
]
Backend = Annotated[
    str,
    typer.Option("--backend", metavar="BACKEND", help="huggingface, the model in this process; vllm; or vllm-serve."),
]
BaseUrl = Annotated[
    list[str] | None,
    typer.Option(
        "--base-url",
        metavar="URL",
        help="With --backend vllm-serve: the server; give it again for more. Its key is read from MIDSTREAM_API_KEY.",
    ),
]
EngineOptions = Annotated[
    str | None,
    typer.Option("--engine", metavar="JSON", help="With --backend vllm: arguments of vllm.LLM, as one JSON object."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one machine-readable object to stdout.")]
Prompts = Annotated[
    list[str] | None, typer.Option("--prompt", "-p", metavar="TEXT", help="A prompt; give it again for more.")
]
PromptsFile = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="Prompts from a .jsonl file (records with text, messages or prompt_token_ids), from a .txt file (one "
        "per line), or from stdin (-).",
    ),
]
Layers = Annotated[
    list[str] | None,
    typer.Option("--layers", "-l", metavar="LAYERS", help="Layer ids such as 10,20, or all (the default)."),
]
SITE_NAMES = "resid_pre, resid_post, attn_out, mlp_out, head_out, router_logits, q, k"
Sites = Annotated[
    list[str] | None,
    typer.Option("--site", "-s", metavar="SITE", help=f"resid_post (the default), or some of: {SITE_NAMES}."),
]
StorageDtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="DTYPE", help="Storage type, e.g. float32; else the model's own, bit for bit."),
]
ComputeDtype = Annotated[
    str, typer.Option("--model-dtype", metavar="DTYPE", help="What the model computes in; auto is its own.")
]
"""Of commands whose --dtype is the storage type."""
NoSpecialTokens = Annotated[
    bool, typer.Option("--no-special-tokens", help="Add no BOS or other special tokens to text.")
]
ModelDtype = Annotated[
    str, typer.Option("--dtype", metavar="DTYPE", help="What the model computes in; auto is its own.")
]
JsonFile = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the object of --json into this file.")
]

# --- how to sample

Temperature = Annotated[float | None, typer.Option("--temperature", metavar="X", help="Sample; 0 is greedy.")]
TopP = Annotated[
    float | None, typer.Option("--top-p", metavar="X", help="Sample from the likeliest tokens that hold this much.")
]
TopK = Annotated[int | None, typer.Option("--top-k", metavar="N", help="Sample from this many likeliest tokens.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Sample; the same seed gives the same.")]
Count = Annotated[int, typer.Option("--n", metavar="N", help="Continuations of each prompt.")]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="End a continuation at this text; give it again for more."),
]

# --- how to steer (steering.py reads them)

Steer = Annotated[
    list[str] | None,
    typer.Option(
        "--steer",
        metavar="FILE",
        help="Steer with a vector file (.safetensors, .gguf, .json), or with a .json file of a whole InterventionSpec; "
        "give it again for more, which act in order.",
    ),
]
Strength = Annotated[
    list[float] | None,
    typer.Option(
        "--strength",
        metavar="S",
        help="How much of each vector; 1 if left out. As the others of steering, give it once for all vector files, or "
        "once for each, in their order.",
    ),
]
_STEER_LAYERS = "Where a vector file acts, e.g. 10,20; all layers that it has, if left out."
CaptureSteerLayers = Annotated[list[str] | None, typer.Option("--steer-layers", metavar="LAYERS", help=_STEER_LAYERS)]
SteerLayers = Annotated[
    list[str] | None, typer.Option("--layers", "-l", "--steer-layers", metavar="LAYERS", help=_STEER_LAYERS)
]
_STEER_ROWS = "Which rows are steered, e.g. generated, or 'prompt[-1], generated'; every row if left out."
CaptureSteerRows = Annotated[list[str] | None, typer.Option("--steer-rows", metavar="ROWS", help=_STEER_ROWS)]
SteerRows = Annotated[list[str] | None, typer.Option("--rows", "-r", "--steer-rows", metavar="ROWS", help=_STEER_ROWS)]
SteerKind = Annotated[
    list[str] | None,
    typer.Option(
        "--kind", metavar="KIND", help="What is done with the vectors: add (if left out), ablate, clamp, replace."
    ),
]
SteerValue = Annotated[
    list[float] | None,
    typer.Option("--value", metavar="C", help="What clamp makes of the projection on the vector."),
]
NormMatch = Annotated[
    bool, typer.Option("--norm-match", help="A vector that is added takes each row's own norm first.")
]


def capture_spec(
    layers: Sequence[str] | None, site: Sequence[str] | None, rows: str | None, dtype: str | None
) -> CaptureSpec:
    """The options of a capture as its spec."""
    from midstream.core.capture import CaptureSpec, as_storage_dtype
    from midstream.core.select import SelectSpec

    ids = layer_ids(layers)
    return CaptureSpec(
        sites=site_names(site) or ("resid_post",),
        layers=None if ids is None else tuple(ids),
        select=SelectSpec.read(rows, "--rows"),
        dtype=as_storage_dtype(dtype, "--dtype"),
    )


def layer_ids(words: Sequence[str] | None, option: str = "--layers") -> list[int] | None:
    """`10,20` (or several of it) as ids; `all` and nothing are None. Raises E_LAYER_RANGE for another word."""
    parts = _parts(words)
    if parts is None or parts == ["all"]:
        return None
    for part in parts:
        if not part.lstrip("-").isdecimal():
            from midstream.core.errors import spec_error

            raise spec_error("E_LAYER_RANGE", option, f"{part!r} is no layer id")
    return [int(part) for part in parts]


def site_names(words: Sequence[str] | None) -> tuple[Site, ...] | None:
    """`resid_post,attn_out` (or several of it) as sites, each once. Raises E_SITE for another name."""
    from midstream.core.sites import as_site

    parts = _parts(words)
    return None if parts is None else tuple(dict.fromkeys(as_site(part, "--site") for part in parts))


def _parts(words: Sequence[str] | None) -> list[str] | None:
    """The pieces between commas; an empty piece stays, to be refused by name."""
    return [part.strip() for word in words for part in word.split(",")] if words else None


def check_out_file(path: Path | None, option: str = "--out", example: str = "acts.safetensors") -> None:
    """Refuse, before any work, a file that could not be written: the directory is missing, or it is one itself."""
    if path is None:
        return
    if path.is_dir():
        raise IsADirectoryError(f"{option} {path} is a directory: name a file in it, e.g. {path / example}")
    _check_parent(path, option)


def check_out_directory(path: Path) -> None:
    """Refuse, before any work, a directory that could not be made, or that is a file."""
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"--out {path} is a file: name a directory")
    if not path.exists():
        _check_parent(path, "--out")


def _check_parent(path: Path, option: str) -> None:
    parent = path.absolute().parent
    if not parent.exists():
        raise FileNotFoundError(f"{option} {path}: there is no directory {path.parent}; type: mkdir -p {path.parent}")
    if not parent.is_dir():
        raise NotADirectoryError(f"{option} {path}: {path.parent} is not a directory; choose another path")
    if not os.access(parent, os.W_OK):
        raise PermissionError(f"{option} {path}: no right to write into {path.parent}; choose another path")
