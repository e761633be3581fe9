"""The options of the backend, checked at the door."""

from __future__ import annotations

import os
from typing import Annotated, Any, ClassVar, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, StrictBool

from midstream.core.backend import BackendSpec
from midstream.core.errors import spec_error
from midstream.core.narrow import is_list
from midstream.core.wire import Int, Number, Wire


def _urls(value: Any) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    if not is_list(given) or not given:
        raise spec_error("E_BAD_PARAM", "", f"is the address of a server, or a list of them, got {value!r:.60}")
    return tuple(dict.fromkeys(_url(one) for one in given))


def _url(value: Any) -> str:
    """An address without the trailing /v1 that other clients want."""
    parts = urlsplit(value) if isinstance(value, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise spec_error("E_BAD_PARAM", "", f"an address is http://host:port, got {value!r:.60}")
    if parts.username or parts.password:
        raise spec_error("E_BAD_PARAM", "", "an address holds no key: give api_key")
    return value.rstrip("/").removesuffix("/v1").rstrip("/")


class ServeOptions(Wire):
    """How servers are reached. request_timeout, retry_backoff: seconds. max_concurrency: requests at a time, on each.

    artifact_dir: a directory that the servers see too, in place of uploads. lora: an adapter, as the servers see its
    path; checkpoint: a folder whose weights the servers must serve.

    >>> ServeOptions(base_url="http://localhost:8000/v1/").base_url
    ('http://localhost:8000',)
    """

    root: ClassVar[str] = "options"

    base_url: Annotated[tuple[str, ...], BeforeValidator(_urls)]
    request_timeout: Annotated[Number, Field(gt=0)] = 120.0
    max_concurrency: Annotated[Int, Field(ge=1)] = 8
    max_retries: Annotated[Int, Field(ge=0)] = 3
    retry_backoff: Annotated[Number, Field(ge=0)] = 0.5
    artifact_dir: str | None = None
    tokenizer_name_or_path: str | None = None
    trust_remote_code: StrictBool = False
    lora: str | None = None
    checkpoint: str | None = None

    @classmethod
    def read(cls, spec: BackendSpec) -> Self:
        """Those of a backend."""
        if "base_url" not in spec.options:
            message = "where is the server? give base_url='http://host:port'"
            raise spec_error("E_BAD_PARAM", "options.base_url", message)
        return cls.of(dict(spec.options))


def api_key_of_servers() -> dict[str, str]:
    """The option `api_key`, where the environment has one: MIDSTREAM_API_KEY."""
    key = os.environ.get("MIDSTREAM_API_KEY")
    return {} if key is None else {"api_key": key}
