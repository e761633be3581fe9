"""The KV connector that writes hidden-states files from taps: its half in the scheduler; the worker's is `files.py`.

It moves no keys and values. It is there because a connector is told when a request ends, and because what it returns
then is the one thing that vLLM carries back to whoever asked: `kv_transfer_params["hidden_states_path"]`.
"""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from midstream.core.errors import ModelLoadError

from .activation import settings_of
from .extraction import group_of
from .file_settings import FileSettings
from .files import Ended, FileNews
from .prefix_cache import noticed
from .worker import files_here, is_here

_PLAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_CHOICE: Final = re.compile(r"(\d+)_(.+)")
_FAMILIES: Final = 4096
"""Requests with n > 1 whose paths are remembered until their last choice has ended."""


@dataclass
class _Metadata(KVConnectorMetadata):
    news: FileNews = field(default_factory=FileNews)


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Named in `kv_transfer_config`, with this module as `kv_connector_module_path`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if settings_of(vllm_config) is None:
            raise ModelLoadError("hidden-states files come from taps: give additional_config={'midstream': {}} too")
        settings = FileSettings.read(vllm_config)
        assert settings is not None, "this module is the connector's"
        self._settings = settings
        self._group = group_of(kv_cache_config)
        self._paths: dict[str, str] = {}
        self._families: OrderedDict[str, dict[int, str]] = OrderedDict()
        self._news = FileNews()
        if role is KVConnectorRole.SCHEDULER:
            settings.check_directory()
            if not envs.VLLM_ENABLE_V1_MULTIPROCESSING and not is_here(vllm_config):
                raise ModelLoadError(
                    "workers in other processes hear of the last files from a step that only an engine in a process of "
                    "its own runs: set VLLM_ENABLE_V1_MULTIPROCESSING=1"
                )

    # --- in the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """No token comes from elsewhere."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are vLLM's own affair."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What the workers must know with this step."""
        news, self._news = self._news, FileNews()
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id in self._paths:
                news.begun[new.req_id] = self._paths[new.req_id]
        return _Metadata(news)

    def on_new_request(self, request: Any) -> None:
        """A request has arrived: whether it gets a file, and where."""
        ours = noticed(request)
        if ours is not None and ours.wishes.file is not None:
            self._paths[request.request_id] = self._path_of(request.request_id)

    def _path_of(self, request_id: str) -> str:
        """A name that is the request's own, whatever its id: no part of a path comes from a request."""
        name = request_id if _PLAIN.fullmatch(request_id) else hashlib.sha256(request_id.encode()).hexdigest()
        return str(self._settings.directory / f"{name}.safetensors")

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended: its file is due now, and its path goes back.

        Its blocks are free: whoever writes the file reads them before another pass can.
        """
        one = request.request_id
        path = self._paths.pop(one, None)
        if path is None:
            return False, None
        here = files_here(self._vllm_config)
        if request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR):
            if here is None:
                self._news.dropped.append(one)
            else:
                here.drop([one])
            return False, None
        ended = Ended(one, list(request.all_token_ids), request.num_prompt_tokens, list(block_ids))
        if here is None:
            self._news.ended.append(ended)  # they hear of it with the next step, which vLLM runs for just that
        else:
            here.write(ended)
        return False, {"hidden_states_path": path, **self._of_choices(one, path)}

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """The same where a model has several kinds of cache."""
        return self.request_finished(request, block_ids[self._group])

    def shutdown(self) -> None:
        """The engine ends: what is being written is finished."""
        if (here := files_here(self._vllm_config)) is not None:
            here.close()

    def _of_choices(self, request_id: str, path: str) -> dict[str, Any]:
        """With n > 1, the paths of all choices that have ended: vLLM carries back those of the last to end."""
        found = _CHOICE.fullmatch(request_id)
        if found is None:
            return {}
        family = self._families.setdefault(found[2], {})
        family[int(found[1])] = path
        while len(self._families) > _FAMILIES:
            self._families.popitem(last=False)
        return {"hidden_states_paths": [family[choice] for choice in sorted(family)]}

    # --- in the workers: rows are taken by taps, not here

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing of keys and values is saved."""

    def wait_for_save(self) -> None:
        """Files are written beside the engine."""
