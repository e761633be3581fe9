"""Hidden-states files of an engine: how they are written, and what one request asks of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field, StrictBool

from midstream.core.errors import ModelLoadError, SpecError, choices, spec_error
from midstream.core.select import SelectSpec
from midstream.core.wire import Int, Wire

from ..requests import AuxLayerIds, FileWishes
from .extraction import METHOD

CONNECTOR: Final = "HiddenStatesConnector"
MODULE: Final = "midstream.backends.vllm.plugin.connector"
_REQUEST: Final = ("aux_layer_ids", "select", "include_output_tokens", "source")
_ROOT: Final = "kv_transfer_params"


class FileSettings(Wire):
    """How an engine writes files, by vLLM's own names, and two of ours.

    aux_layer_ids: of requests that name none; None: they get no file. max_storage_bytes: past it the oldest files are
    removed; None: none is.

    >>> FileSettings(shared_storage_path="/data", num_writer_threads=0)
    Traceback (most recent call last):
      ...
    midstream.core.errors.SpecError: E_BAD_PARAM at kv_connector_extra_config.num_writer_threads: ...
    """

    root: ClassVar[str] = "kv_connector_extra_config"

    shared_storage_path: str = "/tmp"
    num_writer_threads: Annotated[Int, Field(ge=1)] = 8
    use_synchronization_lock: StrictBool = True
    aux_layer_ids: AuxLayerIds | None = None
    max_storage_bytes: Annotated[Int, Field(ge=1)] | None = None

    @classmethod
    def read(cls, vllm_config: Any) -> FileSettings | None:
        """What an engine's `kv_transfer_config` says; None where its connector is not ours. ModelLoadError: not so."""
        given = vllm_config.kv_transfer_config
        if given is None or given.kv_connector_module_path != MODULE:
            return None
        extra: dict[str, Any] = dict(given.kv_connector_extra_config or {})
        if extra.pop("allow_custom_save_path", False):
            raise ModelLoadError("allow_custom_save_path: no path is taken from a request here; leave it out")
        try:
            return cls.of(extra)
        except SpecError as error:
            raise ModelLoadError(str(error)) from None

    @property
    def directory(self) -> Path:
        """Where files go."""
        return Path(self.shared_storage_path).absolute()

    def check_directory(self) -> None:
        """ModelLoadError for a directory that cannot be made or written to."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelLoadError(f"shared_storage_path {self.directory}: {error.strerror}: name another") from None
        if not os.access(self.directory, os.W_OK | os.X_OK):
            raise ModelLoadError(f"shared_storage_path {self.directory}: no right to write there: name another")

    def check_layers(self, depth: int) -> None:
        """ModelLoadError for an id that a model of `depth` blocks has not."""
        if (largest := max(self.aux_layer_ids or (0,))) > depth:
            raise ModelLoadError(f"{self.root}.aux_layer_ids: {_beyond(largest, depth)}")


def hidden_states_files(
    storage: str | os.PathLike[str],
    *,
    num_writer_threads: int = 8,
    use_synchronization_lock: bool = True,
    aux_layer_ids: tuple[int, ...] | list[int] | None = None,
    max_storage_bytes: int | None = None,
) -> dict[str, Any]:
    """The `kv_transfer_config` of an engine that writes hidden-states files into `storage`. SpecError: settings that
    cannot be.

    num_writer_threads, use_synchronization_lock: as vLLM's own connector has them. aux_layer_ids: of requests that name
    none. max_storage_bytes: past it the oldest files are removed.
    """
    settings = FileSettings.of({
        "shared_storage_path": os.fspath(storage),
        "num_writer_threads": num_writer_threads,
        "use_synchronization_lock": use_synchronization_lock,
        "aux_layer_ids": aux_layer_ids,
        "max_storage_bytes": max_storage_bytes,
    })  # fmt: skip
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_producer",
        "kv_connector_module_path": MODULE,
        "kv_connector_extra_config": settings.model_dump(mode="json", exclude_none=True),
    }


def file_wishes(
    given: Any, settings: FileSettings, depth: int, extracted: tuple[int, ...] | None = None
) -> FileWishes | None:
    """What a request's `kv_transfer_params` ask for; None where it gets no file. depth: how many blocks the model has.

    extracted: the layers that vLLM's own extraction puts into its cache, where it does.

    >>> some = FileSettings(shared_storage_path="/tmp")
    >>> made = file_wishes({"aux_layer_ids": [2], "select": "prompt[-1]"}, some, depth=4)
    >>> made.places, str(made.select)
    ((('resid_post', 1),), 'prompt[-1]')
    """
    asked: Mapping[str, Any] = {} if given is None else given
    if not isinstance(asked, Mapping):
        raise spec_error("E_BAD_PARAM", _ROOT, f"must be an object, not {type(given).__name__}")
    if "hidden_states_path" in asked:
        message = "no path is taken from a request: leave it out, and read the one that comes back"
        raise spec_error("E_BAD_PARAM", f"{_ROOT}.hidden_states_path", message)
    if unknown := sorted(set(asked) - set(_REQUEST)):
        raise spec_error("E_UNKNOWN_FIELD", f"{_ROOT}.{unknown[0]}", f"there are: {choices(_REQUEST)}")
    source = asked.get("source", "taps")
    if source == "cache" and extracted is None:
        message = f"this engine extracts nothing: give it speculative_config={{'method': '{METHOD}', …}}, or use taps"
        raise spec_error("E_BAD_PARAM", f"{_ROOT}.source", message)
    ids = asked.get("aux_layer_ids", extracted if source == "cache" else settings.aux_layer_ids)
    if ids is None:
        if asked:
            raise spec_error("E_BAD_PARAM", f"{_ROOT}.aux_layer_ids", "name the layers: k is the stream after k blocks")
        return None
    rows, output = asked.get("select"), asked.get("include_output_tokens", False)
    if not isinstance(output, bool):
        raise spec_error("E_BAD_PARAM", f"{_ROOT}.include_output_tokens", "is true or false")
    if rows is not None and "include_output_tokens" in asked:
        message = "select says whether generated rows are among them: give one of the two"
        raise spec_error("E_BAD_PARAM", f"{_ROOT}.include_output_tokens", message)
    select = SelectSpec.read(rows, f"{_ROOT}.select") if rows is not None else None
    if rows is None and not output:
        select = SelectSpec(prompt="all")
    made = FileWishes.of({"aux_layer_ids": ids, "select": select, "source": source})
    if source == "cache" and (absent := sorted(set(made.aux_layer_ids) - set(extracted or ()))):
        message = f"{absent[0]} is not in this engine's extraction, {list(extracted or ())} from its boot: or use taps"
        raise spec_error("E_LAYER_RANGE", f"{_ROOT}.aux_layer_ids", message)
    if (largest := max(made.aux_layer_ids)) > depth:
        raise spec_error("E_LAYER_RANGE", f"{_ROOT}.aux_layer_ids", _beyond(largest, depth))
    return made


def _beyond(largest: int, depth: int) -> str:
    return f"{largest} is not in 0..{depth}, where k is the stream after k blocks"
