"""The tables. Times are seconds since 1970 (UTC), as floats; sizes are bytes; ids are texts.

A change here needs a migration beside it (migrations/versions): a test holds the two together.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Double, ForeignKey, Index, MetaData, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

HELD, SETTLED, FREED, EXPIRED = "held", "settled", "freed", "expired"
"""A hold begins as the first and ends, once, as one of the others."""

QUEUED, RUNNING, DONE, FAILED, CANCELLED = "queued", "running", "done", "failed", "cancelled"
"""A job begins as the first; the last three are its ends."""

_NAMES: Final = {
    "pk": "pk_%(table_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
}


class Base(DeclarativeBase):
    """Every table; constraints are named alike on each database."""

    metadata = MetaData(naming_convention=_NAMES)
    type_annotation_map = {int: BigInteger, float: Double, str: String}  # noqa: RUF012


class KeyRow(Base):
    """A key. hash: the SHA-256 of its secret. held: what its open holds take; spent: what its settled ones paid.

    artifact_bytes, file_bytes, result_bytes: what it keeps here, counted against quotas.
    """

    __tablename__ = "keys"

    id: Mapped[str] = mapped_column(primary_key=True)
    prefix: Mapped[str] = mapped_column(unique=True)
    hash: Mapped[str]
    name: Mapped[str]
    scopes: Mapped[str]
    created: Mapped[float]
    revoked_at: Mapped[float | None]
    budget: Mapped[int | None]
    held: Mapped[int] = mapped_column(default=0)
    spent: Mapped[int] = mapped_column(default=0)
    artifact_bytes: Mapped[int] = mapped_column(default=0)
    file_bytes: Mapped[int] = mapped_column(default=0)
    result_bytes: Mapped[int] = mapped_column(default=0)


class UsageRow(Base):
    """What a key has used in all. rows, bytes: of activations."""

    __tablename__ = "usage"

    key_id: Mapped[str] = mapped_column(ForeignKey("keys.id"), primary_key=True)
    requests: Mapped[int] = mapped_column(default=0)
    prompt_tokens: Mapped[int] = mapped_column(default=0)
    completion_tokens: Mapped[int] = mapped_column(default=0)
    rows: Mapped[int] = mapped_column(default=0)
    bytes: Mapped[int] = mapped_column(default=0)


class HoldRow(Base):
    """Tokens that are set aside for one piece of work. what: which, for a person."""

    __tablename__ = "holds"
    __table_args__ = (Index(None, "state", "lease_until"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(ForeignKey("keys.id"), index=True)
    what: Mapped[str]
    state: Mapped[str]
    tokens: Mapped[int]
    paid: Mapped[int] = mapped_column(default=0)
    created: Mapped[float]
    lease_until: Mapped[float]


class ArtifactRow(Base):
    """That a key owns an artifact, which several may; its file is in the registry."""

    __tablename__ = "artifacts"

    key_id: Mapped[str] = mapped_column(ForeignKey("keys.id"), primary_key=True)
    artifact_id: Mapped[str] = mapped_column(primary_key=True, index=True)
    bytes: Mapped[int]
    created: Mapped[float]


class FileRow(Base):
    """A file that a key sent, or that was made for it."""

    __tablename__ = "files"

    id: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(ForeignKey("keys.id"), index=True)
    filename: Mapped[str]
    purpose: Mapped[str]
    status: Mapped[str]
    bytes: Mapped[int]
    sha256: Mapped[str]
    created: Mapped[float]


class BatchRow(Base):
    """A batch, with the fields of OpenAI's object. errors and metadata are JSON; total … failed count its jobs."""

    __tablename__ = "batches"

    id: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(ForeignKey("keys.id"), index=True)
    endpoint: Mapped[str]
    input_file_id: Mapped[str]
    completion_window: Mapped[str]
    state: Mapped[str] = mapped_column(index=True)
    output_file_id: Mapped[str | None]
    error_file_id: Mapped[str | None]
    errors: Mapped[str | None] = mapped_column(Text)
    metadata_json: Mapped[str | None] = mapped_column("metadata", Text)
    total: Mapped[int] = mapped_column(default=0)
    completed: Mapped[int] = mapped_column(default=0)
    failed: Mapped[int] = mapped_column(default=0)
    created: Mapped[float]
    in_progress_at: Mapped[float | None]
    finalizing_at: Mapped[float | None]
    completed_at: Mapped[float | None]
    failed_at: Mapped[float | None]
    expires_at: Mapped[float | None]
    expired_at: Mapped[float | None]
    cancelling_at: Mapped[float | None]
    cancelled_at: Mapped[float | None]


class JobRow(Base):
    """A request that outlives its connection. claim: the token of who runs it, for as long as the lease lasts.

    place: in its batch. bytes: of body and result together. expires_at: when it is forgotten, once it has ended.
    """

    __tablename__ = "jobs"
    __table_args__ = (
        Index(None, "state", "created", "place", "id"),  # the queue
        Index(None, "batch_id", "place"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(ForeignKey("keys.id"), index=True)
    batch_id: Mapped[str | None] = mapped_column(ForeignKey("batches.id"))
    place: Mapped[int] = mapped_column(default=0)
    custom_id: Mapped[str | None]
    endpoint: Mapped[str]
    body: Mapped[str] = mapped_column(Text)
    state: Mapped[str]
    claim: Mapped[str | None]
    worker: Mapped[str | None]
    attempts: Mapped[int] = mapped_column(default=0)
    lease_until: Mapped[float | None]
    status_code: Mapped[int | None]
    result: Mapped[str | None] = mapped_column(Text)
    bytes: Mapped[int]
    created: Mapped[float]
    started: Mapped[float | None]
    ended: Mapped[float | None]
    expires_at: Mapped[float | None] = mapped_column(index=True)
