"""Every limit of a server, in one place; `GET /v1/capabilities` shows them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from midstream.core.wire import Int, Number, Wire


def _count(default: int, words: str) -> Any:
    return Field(default, ge=1, description=words)


def _seconds(default: float, words: str) -> Any:
    return Field(default, gt=0, description=words)


class Limits(Wire):
    """What a server takes.

    >>> Limits().held_seconds
    120.0
    """

    root: ClassVar[str] = "limits"

    capture_cap: Int = _count(33_554_432, "numbers (layers × tokens × width) of one capture")
    body_bytes: Int = _count(64 << 20, "bytes of one request")
    upload_bytes: Int = _count(512 << 20, "bytes of one file or artifact")
    artifact_bytes: Int = _count(4 << 30, "bytes of artifacts that one key may keep")
    file_bytes: Int = _count(4 << 30, "bytes of files that one key may keep")
    result_bytes: Int = _count(1 << 30, "bytes of jobs and their results that one key may keep")
    held_bytes: Int = _count(4 << 30, "bytes of activations that are made, or wait for whoever asked, in all")
    held_seconds: Number = _seconds(120.0, "for which a handle is kept")
    sequences: Int = _count(256, "prompts × choices of one request")
    running: Int = _count(256, "requests of one key at a time")
    waiting: Int = _count(1024, "requests of all keys at a time")
    wait_seconds: Number = _seconds(30.0, "for which a request waits for room, before it is refused with 429")
    body_seconds: Number = _seconds(60.0, "in which a whole body must come")
    job_seconds: Number = _seconds(7 * 86400.0, "for which the result of a job is kept")
    jobs_at_a_time: Int = _count(4, "jobs that run at a time")
    batch_lines: Int = _count(50_000, "requests of one batch")
    stop_seconds: Annotated[Number, Field(ge=0, description="for what runs when the server is told to stop")] = 20.0
    lease_seconds: Number = _seconds(60.0, "after which the holds and jobs of a server that died are free again")
