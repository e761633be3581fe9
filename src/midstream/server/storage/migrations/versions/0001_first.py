"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make them."""
    op.create_table(
        "keys",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("prefix", sa.String(), nullable=False),
        sa.Column("hash", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("scopes", sa.String(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double()),
        sa.Column("budget", sa.BigInteger()),
        sa.Column("held", sa.BigInteger(), nullable=False),
        sa.Column("spent", sa.BigInteger(), nullable=False),
        sa.Column("artifact_bytes", sa.BigInteger(), nullable=False),
        sa.Column("file_bytes", sa.BigInteger(), nullable=False),
        sa.Column("result_bytes", sa.BigInteger(), nullable=False),
        sa.UniqueConstraint("prefix", name="uq_keys_prefix"),
    )
    op.create_table(
        "usage",
        _key(primary_key=True),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "holds",
        sa.Column("id", sa.String(), primary_key=True),
        _key(),
        sa.Column("what", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("paid", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("lease_until", sa.Double(), nullable=False),
    )
    op.create_table(
        "artifacts",
        _key(primary_key=True),
        sa.Column("artifact_id", sa.String(), primary_key=True),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
    )
    op.create_table(
        "files",
        sa.Column("id", sa.String(), primary_key=True),
        _key(),
        sa.Column("filename", sa.String(), nullable=False),
        sa.Column("purpose", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
    )
    op.create_table(
        "batches",
        sa.Column("id", sa.String(), primary_key=True),
        _key(),
        sa.Column("endpoint", sa.String(), nullable=False),
        sa.Column("input_file_id", sa.String(), nullable=False),
        sa.Column("completion_window", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("output_file_id", sa.String()),
        sa.Column("error_file_id", sa.String()),
        sa.Column("errors", sa.Text()),
        sa.Column("metadata", sa.Text()),
        sa.Column("total", sa.BigInteger(), nullable=False),
        sa.Column("completed", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("in_progress_at", sa.Double()),
        sa.Column("finalizing_at", sa.Double()),
        sa.Column("completed_at", sa.Double()),
        sa.Column("failed_at", sa.Double()),
        sa.Column("expires_at", sa.Double()),
        sa.Column("expired_at", sa.Double()),
        sa.Column("cancelling_at", sa.Double()),
        sa.Column("cancelled_at", sa.Double()),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(), primary_key=True),
        _key(),
        sa.Column("batch_id", sa.String(), sa.ForeignKey("batches.id")),
        sa.Column("place", sa.BigInteger(), nullable=False),
        sa.Column("custom_id", sa.String()),
        sa.Column("endpoint", sa.String(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("claim", sa.String()),
        sa.Column("worker", sa.String()),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("lease_until", sa.Double()),
        sa.Column("status_code", sa.BigInteger()),
        sa.Column("result", sa.Text()),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("started", sa.Double()),
        sa.Column("ended", sa.Double()),
        sa.Column("expires_at", sa.Double()),
    )
    for table, columns in _INDEXES:
        op.create_index(f"ix_{table}_{'_'.join(columns)}", table, columns)


_INDEXES = (
    ("holds", ["state", "lease_until"]),
    ("holds", ["key_id"]),
    ("artifacts", ["artifact_id"]),
    ("files", ["key_id"]),
    ("batches", ["key_id"]),
    ("batches", ["state"]),
    ("jobs", ["state", "created", "place", "id"]),
    ("jobs", ["batch_id", "place"]),
    ("jobs", ["key_id"]),
    ("jobs", ["expires_at"]),
)


def _key(primary_key: bool = False) -> sa.Column[str]:
    """Whose a row is."""
    return sa.Column("key_id", sa.String(), sa.ForeignKey("keys.id"), primary_key=primary_key, nullable=False)
