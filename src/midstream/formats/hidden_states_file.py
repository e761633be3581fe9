"""vLLM's hidden-states file, for the training of draft models: written, read, and made a capture again.

One `.safetensors` per sequence, as vLLM's ExampleHiddenStatesConnector writes it: `hidden_states`
`[tokens, layers, hidden]` and `token_ids` `[tokens]` int64, layers by ascending aux id, where aux id k is the
stream after k blocks: `resid_pre[k]`, which is `resid_post[k - 1]`. A writer holds an exclusive flock on
`<file>.lock` from before the file exists until it is complete; a reader takes a shared one.

vLLM writes no layer ids. Ours stand, with the model and the prompt's length, in one JSON text under the
metadata key `midstream.hidden_states`, which vLLM's reader passes over. A file of selected rows has a third tensor,
`positions` `[tokens]` int64.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from midstream.core.capture import CaptureReceipt, CaptureSpec, Labels
from midstream.core.errors import CaptureError, FileFormatError, SpecError, spec_error
from midstream.core.generation import Completion
from midstream.core.result import CaptureResult
from midstream.core.sites import Site, SiteLayout, aux_place
from midstream.core.wire import Int, Wire

from .tensor_file import opened, owned, read_json, write

KEY: Final = "midstream.hidden_states"
_WHAT: Final = "a hidden-states file"
_POLL: Final = 0.02  # seconds between two looks at a lock: flock itself knows no timeout


class _About(Wire):
    """Our JSON text in the file: what vLLM's tensors leave out."""

    root: ClassVar[str] = KEY

    format: Literal[1] = 1
    layer_ids: tuple[Annotated[Int, Field(ge=0)], ...] | None = None
    model_ref: str = ""
    model_fingerprint: str = ""
    prompt_len: Annotated[Int, Field(ge=0)] | None = None
    generated: tuple[Int, ...] = ()


@dataclass(frozen=True)
class HiddenStatesFile:
    """One sequence. hidden_states: `[tokens, layers, hidden]`. token_ids: `[tokens]`, `[0]` where none are kept.

    positions: `[tokens]`, where rows are not simply the first ones. layer_ids: aux ids, one per layer; None in a file
    of vLLM's own. prompt_len: where generation begins; None when the file does not say. generated: the sampled ids, the
    last of which has no row.
    """

    hidden_states: Tensor
    token_ids: Tensor
    layer_ids: tuple[int, ...] | None = None
    model_ref: str = ""
    model_fingerprint: str = ""
    prompt_len: int | None = None
    generated: tuple[int, ...] = ()
    positions: Tensor | None = None


# --- writing


def save_capture(result: CaptureResult, directory: str | PathLike[str], first: int = 0) -> list[Path]:
    """Write one file per sample into `directory` (made if missing): `sample-000000.safetensors` and so on from `first`.

    Takes the resid_pre and resid_post rows; other sites are left out. Each sample must have every row, or
    every row of its prompt, as vLLM's own files have. Refuses, before anything is written: no such site
    (E_SITE), rows selected in part and n > 1 (E_SELECTION), rows without token ids (CaptureError). Samples
    that failed get no file, and a warning names them.
    """
    if not result.labelled:
        raise CaptureError("these rows have no labels (a file without token ids): a hidden-states file needs them")
    columns = _columns(result)
    whole = [sample for sample in range(len(result)) if sample not in result.errors]
    for sample in whole:
        _check_rows(result, sample)
    if result.errors:
        warnings.warn(f"no hidden-states file for the failed samples {sorted(result.errors)}", stacklevel=2)
    place = Path(directory)
    if place.exists() and not place.is_dir():
        raise NotADirectoryError(f"{directory} is a file: name a directory")
    place.mkdir(parents=True, exist_ok=True)
    paths = [place / f"sample-{first + sample:06d}.safetensors" for sample in whole]
    return [_save_sample(result, sample, columns, path) for sample, path in zip(whole, paths, strict=True)]


def _columns(result: CaptureResult) -> dict[int, tuple[Site, int]]:
    """Aux id → the (site, layer) that holds it, ids ascending."""
    if not {"resid_pre", "resid_post"} & set(result.sites):
        have = ", ".join(result.sites)
        message = f"a hidden-states file holds resid_pre or resid_post; this capture has: {have}"
        raise spec_error("E_SITE", "sites", message)
    found: dict[int, tuple[Site, int]] = {}
    for site, layer in result.tensors:
        if site == "resid_post":
            found.setdefault(layer + 1, (site, layer))  # the same stream as resid_pre[layer + 1]
        elif site == "resid_pre":
            found[layer] = (site, layer)
    return dict(sorted(found.items()))


def _check_rows(result: CaptureResult, sample: int) -> None:
    """Refuse a sample whose rows are not one whole sequence, or one whole prompt."""
    output = result.outputs[sample]
    if len(output.choices) > 1:
        message = f"sample {sample} has {len(output.choices)} choices; a file holds one sequence: capture with n=1"
        raise SpecError("E_SELECTION", "n", message)
    prompt = len(output.prompt_token_ids)
    every = prompt + max(len(output.token_ids) - 1, 0)
    positions = result.sample_positions(sample)
    if len(positions) not in (prompt, every) or not np.array_equal(positions, np.arange(len(positions))):
        message = (
            f"sample {sample} has {len(positions)} of its {every} rows, and a hidden-states file holds all: "
            "capture without rows="
        )
        raise SpecError("E_SELECTION", "select", message)


def _save_sample(result: CaptureResult, sample: int, columns: Mapping[int, tuple[Site, int]], path: Path) -> Path:
    rows = {site: result.sample(sample, site) for site in {site for site, _ in columns.values()}}
    output = result.outputs[sample]
    file = HiddenStatesFile(
        torch.stack([rows[site][layer] for site, layer in columns.values()], dim=1),
        torch.tensor(result.sample_token_ids(sample), dtype=torch.int64),
        tuple(columns),
        result.model_ref,
        result.model_fingerprint,
        len(output.prompt_token_ids),
        output.token_ids,
    )
    lock = locked(path)
    try:
        return write_file(path, file)
    finally:
        os.close(lock)


def write_file(path: str | PathLike[str], file: HiddenStatesFile, *, durable: bool = True) -> Path:
    """Write one file, whose lock the caller holds. durable: wait until it is on the disk. Raises OSError."""
    about = _About(
        layer_ids=file.layer_ids,
        model_ref=file.model_ref,
        model_fingerprint=file.model_fingerprint,
        prompt_len=file.prompt_len,
        generated=file.generated,
    )
    tensors = {"hidden_states": file.hidden_states, "token_ids": file.token_ids}
    if file.positions is not None:
        tensors["positions"] = file.positions
    return write(path, tensors, {KEY: about.model_dump(mode="json")}, durable=durable)


def locked(path: str | PathLike[str]) -> int:
    """`<path>.lock` held exclusively, as vLLM's writer does, until the descriptor is closed; readers wait for that.

    A new lock file is locked before it gets its name: nobody can take it between the two. The file stays.
    """
    lock = Path(f"{path}.lock")
    new = not lock.exists()
    name = lock.with_name(f".midstream-{secrets.token_hex(8)}.lock") if new else lock
    descriptor = os.open(name, os.O_CREAT | os.O_WRONLY, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if new:
            os.replace(name, lock)
    except BaseException:
        os.close(descriptor)
        if new:
            name.unlink(missing_ok=True)
        raise
    return descriptor


# --- reading


def read(path: str | PathLike[str], timeout: float | None = 60.0) -> HiddenStatesFile:
    """One hidden-states file, ours or vLLM's; waits up to `timeout` seconds while a writer holds its lock.

    `timeout` None waits for ever, as vLLM's reader does. Raises TimeoutError, FileNotFoundError (also when
    the writer let go of the lock without a file), and FileFormatError in one line that names the file.
    """
    tensors, about = _read(path, timeout)
    states, ids = tensors.get("hidden_states"), tensors.get("token_ids", torch.empty(0, dtype=torch.int64))
    positions = tensors.get("positions")
    if states is None or states.ndim != 3:
        raise FileFormatError(f"{path} is not {_WHAT}: it has no tensor hidden_states [tokens, layers, hidden]")
    if ids.ndim != 1 or len(ids) not in (0, len(states)):
        raise FileFormatError(f"{path}: token_ids is {list(ids.shape)} for {len(states)} rows of hidden_states")
    if positions is not None and positions.shape != (len(states),):
        raise FileFormatError(f"{path}: positions is {list(positions.shape)} for {len(states)} rows of hidden_states")
    if about.layer_ids is not None and len(about.layer_ids) != states.shape[1]:
        raise FileFormatError(f"{path}: {len(about.layer_ids)} layer ids for {states.shape[1]} layers")
    return HiddenStatesFile(
        states,
        ids,
        about.layer_ids,
        about.model_ref,
        about.model_fingerprint,
        about.prompt_len,
        about.generated,
        positions,
    )


def read_tensors(path: str | PathLike[str], timeout: float | None = None) -> dict[str, Tensor]:
    """The file's tensors by name, whatever they are, after the same wait as `read`."""
    return _read(path, timeout)[0]


def _read(path: str | PathLike[str], timeout: float | None) -> tuple[dict[str, Tensor], _About]:
    with _written(Path(path), timeout), opened(path, _WHAT) as file:
        found = read_json(file, KEY, path)
        tensors = {name: owned(file, name) for name in file.keys()}  # noqa: SIM118 (the handle is no mapping)
    try:
        return tensors, _About.of(found or {})
    except SpecError as error:
        raise FileFormatError(f"{path}: its metadata is damaged, or of a newer midstream: {error}") from None


@contextmanager
def _written(path: Path, timeout: float | None) -> Iterator[None]:
    """Wait for the writer, and keep the next one off while reading.

    No lock file is no wait: vLLM may be told to write without one, and readers may clear it away.
    """
    try:
        descriptor = os.open(f"{path}.lock", os.O_RDONLY)
    except FileNotFoundError:
        descriptor = None
    try:
        if descriptor is not None:
            _take_shared(descriptor, path, timeout)
            if not path.exists():
                raise FileNotFoundError(f"no file {path}: its writer let go of {path}.lock without writing it")
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _take_shared(descriptor: int, path: Path, timeout: float | None) -> None:
    if timeout is None:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return
    deadline = time.monotonic() + timeout
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{path} is still being written after {timeout:g} s: wait with timeout=") from None
        time.sleep(_POLL)


# --- back to a capture


def as_capture(file: HiddenStatesFile, layer_ids: Sequence[int] | None = None) -> CaptureResult:
    """The file as a capture of one sample: aux id 0 is `resid_pre[0]`, aux id k `resid_post[k - 1]`.

    `layer_ids` are the aux ids in the file's order; they are needed where the file has none, and win over its
    own. A file that does not say where its prompt ends is all prompt. Without token ids the result is not
    `labelled`. Raises E_LAYER_RANGE for ids that do not fit.
    """
    tensors: dict[tuple[Site, int], Tensor] = {}
    with torch.inference_mode(False):
        for aux, place in sorted((aux, place) for place, aux in enumerate(_aux_ids(file, layer_ids))):
            rows = file.hidden_states[:, place].clone(memory_format=torch.contiguous_format)
            tensors[aux_place(aux)] = rows
    layouts: dict[Site, dict[int, SiteLayout]] = {}
    for site, layer in tensors:
        layouts.setdefault(site, {})[layer] = SiteLayout(file.hidden_states.shape[2])
    tokens: list[int] = file.token_ids.tolist()
    labels = _labels(file, tokens)
    receipt = CaptureReceipt(selected=len(file.hidden_states), computed=len(file.hidden_states))
    return CaptureResult(
        labels=labels,
        tensors=tensors,
        layouts=layouts,
        outputs=(Completion(tuple(tokens[: file.prompt_len]), file.generated, receipt=receipt),),
        receipt=receipt,
        spec=CaptureSpec(sites=tuple(layouts), layers=tuple(sorted({layer for _, layer in tensors}))),
        model_ref=file.model_ref,
        model_fingerprint=file.model_fingerprint,
    )


def _aux_ids(file: HiddenStatesFile, layer_ids: Sequence[int] | None) -> list[int]:
    given: Any = file.layer_ids if layer_ids is None else layer_ids
    count = file.hidden_states.shape[1]
    if given is None:
        message = f"this file does not say which {count} layers it holds: give layer_ids=[…] (vLLM's aux layer ids)"
        raise spec_error("E_LAYER_RANGE", "layer_ids", message)
    ids = [int(aux) for aux in given]
    if len(ids) != count or len(set(ids)) != count or min(ids, default=0) < 0:
        message = f"{ids} for a file of {count} layers: as many ids, 0 or more, none twice"
        raise spec_error("E_LAYER_RANGE", "layer_ids", message)
    return ids


def _labels(file: HiddenStatesFile, tokens: list[int]) -> Labels:
    position = np.arange(len(tokens), dtype=np.int64) if file.positions is None else file.positions.numpy()
    prompt_len = len(tokens) if file.prompt_len is None else file.prompt_len
    generated = position >= prompt_len
    choice = np.where(generated, 0, -1)
    return Labels(np.zeros_like(position), choice, position, np.array(tokens, dtype=np.int64), generated)
