"""Options that several commands share, and how their lists are read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from midstream.core.sites import Site

Model = Annotated[
    str,
    typer.Option("--model", "-m", metavar="MODEL", help="A model's folder, a hub id, or smollm2 (bundled)."),
]
Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda, cuda:0, …; auto takes a GPU where there is one.")
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
NoSpecialTokens = Annotated[
    bool, typer.Option("--no-special-tokens", help="Add no BOS or other special tokens to text.")
]


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
