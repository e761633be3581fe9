"""What a request can be refused with, and the body that says so: OpenAI's error object, and the request's id."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final

from sqlalchemy.exc import OperationalError

from midstream.core.errors import (
    BusyError,
    CaptureError,
    EngineError,
    MidstreamError,
    PromptError,
    SpecError,
    UnfitAnswerError,
)

from .storage import StorageError

REQUEST_ID: Final[ContextVar[str]] = ContextVar("midstream_request_id")
"""The id of the request under way, in its header, its log and the body of its refusal."""

_KINDS: Final[Mapping[int, tuple[str, str]]] = {
    400: ("invalid_request_error", "invalid_request"),
    401: ("authentication_error", "invalid_api_key"),
    402: ("insufficient_quota", "insufficient_quota"),
    403: ("permission_error", "permission_denied"),
    404: ("not_found_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "request_timeout"),
    409: ("conflict_error", "conflict"),
    413: ("invalid_request_error", "too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    422: ("capture_error", "capture_failed"),
    429: ("rate_limit_error", "too_many_requests"),
    500: ("server_error", "internal_error"),
    502: ("upstream_server_error", "upstream_server_error"),
    503: ("server_error", "not_ready"),
    507: ("server_error", "storage_full"),
}
"""Status → `type` and `code`."""


class ApiError(MidstreamError):
    """A refusal. param: the field that is at fault. after: seconds until it may go better."""

    def __init__(self, status: int, message: str, param: str | None = None, after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.after = status, param, after

    def body(self, request_id: str | None = None) -> dict[str, Any]:
        """The JSON of it. request_id: where no request is under way."""
        kind, code = _KINDS.get(self.status, _KINDS[500])
        error = {"message": str(self), "type": kind, "param": self.param, "code": code}
        return {"error": error, "request_id": request_id or REQUEST_ID.get()}

    def headers(self) -> dict[str, str]:
        """What goes beside it."""
        found = {} if self.after is None else {"retry-after": str(max(1, round(self.after)))}
        return found | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


class BudgetError(ApiError):
    """More tokens than a key has left."""

    def __init__(self, needed: int, left: int) -> None:
        message = (
            f"this request holds {needed} tokens, and the key has {left} left: lower max_tokens, or raise its budget"
        )
        super().__init__(402, message, "max_tokens")
        self.needed, self.left = needed, left


class StorageFullError(ApiError):
    """A disk without room."""

    def __init__(self) -> None:
        super().__init__(507, "the server's disk is full: nothing was kept")


_SPEC: Final = {"E_ARTIFACT_MISSING": 404, "E_SPEC_TOO_LARGE": 413}


def refusal(error: MidstreamError) -> ApiError:
    """An error of the rest of midstream as a refusal."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, SpecError):
        return ApiError(_SPEC.get(error.code, 400), str(error), error.path or None)
    if isinstance(error, PromptError):
        return ApiError(400, str(error), "prompt")
    if isinstance(error, UnfitAnswerError):
        return ApiError(502, str(error))
    if isinstance(error, CaptureError):
        return ApiError(422, str(error), "capture")
    if isinstance(error, BusyError):
        return ApiError(429, str(error), after=1.0)
    if isinstance(error, EngineError):
        return ApiError(502, str(error))
    if isinstance(error, StorageError):
        return _away()
    return unexpected()


def unexpected() -> ApiError:
    """A fault of ours, of which nothing is shown."""
    return ApiError(500, "something went wrong inside: quote the request id")


def _away() -> ApiError:
    return ApiError(503, "the server's database is away: come again", after=5.0)


def database_refusal(error: OperationalError) -> ApiError:
    """What a database says that cannot be written to, or is not reached."""
    return StorageFullError() if "disk is full" in str(error.orig) or "No space left" in str(error.orig) else _away()
