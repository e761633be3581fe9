"""A model opened for one command, without the noise of the libraries that load it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midstream.language_model import LanguageModel


@contextmanager
def opened(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    backend: str = "huggingface",
    engine: str | None = None,
    base_url: Sequence[str] | None = None,
    dtype_option: str,
) -> Iterator[LanguageModel]:
    """The model `name`, closed at the end; libraries are silent meanwhile, and as talkative as before afterwards.

    engine: `engine_kwargs` of the backend vllm, in JSON. base_url: of the backend vllm-serve. dtype_option: the
    option by which the command takes `dtype`, for the error. Raises as `ms.load` does.
    """
    with _waiting(f"loading {name}"), _quiet():
        import midstream
        from midstream.backends.huggingface.loading import as_torch_dtype

        as_torch_dtype(dtype, dtype_option)
        options = {} if engine is None else {"engine_kwargs": engine_kwargs(engine, backend)}
        options |= _server(base_url, backend)
        model = midstream.load(name, backend=backend, dtype=dtype, device=device, **options)
    with _quiet(), model:
        yield model


def engine_kwargs(text: str, backend: str) -> dict[str, Any]:
    """The object of --engine; E_BAD_PARAM where it is none, or no engine is asked for."""
    from midstream.core.errors import spec_error

    if backend != "vllm":
        raise spec_error("E_BAD_PARAM", "--engine", f"is for --backend vllm; this is {backend}")
    try:
        found = json.loads(text)
    except ValueError as error:
        raise spec_error("E_BAD_PARAM", "--engine", f"is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise spec_error("E_BAD_PARAM", "--engine", "is an object, e.g. '{\"max_model_len\": 4096}'")
    return found


def _server(base_url: Sequence[str] | None, backend: str) -> dict[str, Any]:
    """Where servers are, and their key; E_BAD_PARAM where none is asked for."""
    from midstream.core.errors import spec_error

    if backend != "vllm-serve":
        if base_url:
            raise spec_error("E_BAD_PARAM", "--base-url", f"is for --backend vllm-serve; this is {backend}")
        return {}
    from midstream.backends.vllm.serve.options import api_key_of_servers

    return {"base_url": list(base_url or ()), **api_key_of_servers()}


def _waiting(words: str) -> AbstractContextManager[Any]:
    """A spinner with `words` on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True, markup=False).status(words)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back transformers' warnings, those at its import too, and its progress bars."""
    asked = os.environ.get("TRANSFORMERS_VERBOSITY")
    if asked is None:
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # read when transformers is first imported
    try:
        from transformers.utils import logging
    finally:
        if asked is None:
            del os.environ["TRANSFORMERS_VERBOSITY"]
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    if asked is None:
        logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
