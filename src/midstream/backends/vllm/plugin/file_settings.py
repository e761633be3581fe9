"""Hidden-states files of an engine: how they are written, and what one request asks of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from midstream.core.errors import ModelLoadError, SpecError, choices, spec_error
from midstream.core.select import SelectSpec

from ..requests import FileWishes

CONNECTOR: Final = "HiddenStatesConnector"
MODULE: Final = "midstream.backends.vllm.plugin.connector"
_ENGINE: Final = (
    "shared_storage_path", "num_writer_threads", "use_synchronization_lock", "aux_layer_ids", "max_storage_bytes",
)  # fmt: skip
_REQUEST: Final = ("aux_layer_ids", "rows", "include_output_tokens")
_ROOT: Final = "kv_transfer_params"


def hidden_states_files(storage: str | os.PathLike[str], **settings: Any) -> dict[str, Any]:
    """The `kv_transfer_config` of an engine that writes hidden-states files into `storage`.

    settings: num_writer_threads (8), use_synchronization_lock (True), aux_layer_ids (of requests that name none),
    max_storage_bytes (past it the oldest files go).
    """
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_producer",
        "kv_connector_module_path": MODULE,
        "kv_connector_extra_config": {"shared_storage_path": os.fspath(storage), **settings},
    }


@dataclass(frozen=True)
class FileSettings:
    """How an engine writes files. aux_layer_ids: of requests that name none; None: they get no file.

    directory: `shared_storage_path`. threads: `num_writer_threads`. lock: `use_synchronization_lock`. max_bytes:
    `max_storage_bytes`, past which the oldest files are removed; None: none is.
    """

    directory: Path
    threads: int = 8
    lock: bool = True
    aux_layer_ids: tuple[int, ...] | None = None
    max_bytes: int | None = None

    @classmethod
    def of(cls, vllm_config: Any) -> FileSettings | None:
        """What an engine's `kv_transfer_config` says; None where its connector is not ours. ModelLoadError: not so."""
        given = vllm_config.kv_transfer_config
        if given is None or given.kv_connector_module_path != MODULE:
            return None
        extra: dict[str, Any] = dict(given.kv_connector_extra_config or {})
        if extra.pop("allow_custom_save_path", False):
            raise ModelLoadError("allow_custom_save_path: no path is taken from a request here; leave it out")
        if unknown := sorted(set(extra) - set(_ENGINE)):
            message = f"kv_connector_extra_config has no {unknown[0]!r}; there are: {choices(_ENGINE)}"
            raise ModelLoadError(message)
        default = extra.get("aux_layer_ids")
        try:
            ids = None if default is None else FileWishes(aux_layer_ids=default).aux_layer_ids
        except SpecError as error:
            raise ModelLoadError(f"kv_connector_extra_config.{error.path}: {error.message}") from None
        threads, limit = int(extra.get("num_writer_threads", 8)), extra.get("max_storage_bytes")
        if threads < 1:
            raise ModelLoadError(f"num_writer_threads is {threads}: one at least")
        return cls(
            Path(str(extra.get("shared_storage_path", "/tmp"))).absolute(),
            threads,
            bool(extra.get("use_synchronization_lock", True)),
            ids,
            None if limit is None else int(limit),
        )

    def check_directory(self) -> None:
        """ModelLoadError for a directory that cannot be made or written to."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelLoadError(f"shared_storage_path {self.directory}: {error.strerror}: name another") from None
        if not os.access(self.directory, os.W_OK | os.X_OK):
            raise ModelLoadError(f"shared_storage_path {self.directory}: no right to write there: name another")


def file_wishes(given: Any, settings: FileSettings, depth: int) -> FileWishes | None:
    """What a request's `kv_transfer_params` ask for; None where it gets no file. depth: how many blocks the model has.

    >>> some = FileSettings(Path("/tmp"))
    >>> made = file_wishes({"aux_layer_ids": [2], "rows": "prompt[-1]"}, some, depth=4)
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
    ids = asked.get("aux_layer_ids", settings.aux_layer_ids)
    if ids is None:
        if asked:
            raise spec_error("E_BAD_PARAM", f"{_ROOT}.aux_layer_ids", "name the layers: k is the stream after k blocks")
        return None
    rows, output = asked.get("rows"), asked.get("include_output_tokens", False)
    if not isinstance(output, bool):
        raise spec_error("E_BAD_PARAM", f"{_ROOT}.include_output_tokens", "is true or false")
    if rows is not None and "include_output_tokens" in asked:
        message = "rows say whether generated ones are among them: give one of the two"
        raise spec_error("E_BAD_PARAM", f"{_ROOT}.include_output_tokens", message)
    select = SelectSpec.read(rows, f"{_ROOT}.rows") if rows is not None else None
    if rows is None and not output:
        select = SelectSpec(prompt="all")
    made = FileWishes.of({"aux_layer_ids": ids, "select": select})
    if (largest := max(made.aux_layer_ids)) > depth:
        message = f"{largest} is not in 0..{depth}, where k is the stream after k blocks"
        raise spec_error("E_LAYER_RANGE", f"{_ROOT}.aux_layer_ids", message)
    return made
