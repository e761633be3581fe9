"""Whose an artifact or a file is, under the quota of its key. What is in them is kept elsewhere."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import delete, func, select

from .quota import Quota
from .storage import Database, storable
from .storage.tables import ArtifactRow, FileRow


@dataclass(frozen=True)
class OwnedArtifact:
    """An artifact of a key."""

    artifact_id: str
    bytes: int
    created: float


@dataclass(frozen=True)
class OwnedFile:
    """A file of a key; its content has this SHA-256."""

    id: str
    filename: str
    purpose: str
    status: str
    bytes: int
    sha256: str
    created: float


class Owned:
    """Artifacts and files by their key; what another key owns is as if it were not there."""

    def __init__(
        self, database: Database, artifact_bytes: int, file_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._database, self._clock = database, clock
        self.artifact_quota: Final = Quota("artifact", artifact_bytes)
        self.file_quota: Final = Quota("file", file_bytes)

    def room(self, key_id: str, quota: Quota) -> int:
        """How many bytes a key may still keep: what an upload may have at most as it arrives."""
        with self._database.reading() as session:
            return quota.room(session, key_id)

    # --- artifacts

    def add_artifact(self, key_id: str, artifact_id: str, nbytes: int) -> bool:
        """Let a key own an artifact; QuotaError where it has no room. Whether it did not own it before."""
        with self._database.session() as session:
            self.artifact_quota.lock(session, key_id)
            if session.get(ArtifactRow, (key_id, artifact_id)) is not None:
                return False
            self.artifact_quota.take(session, key_id, nbytes)
            session.add(ArtifactRow(key_id=key_id, artifact_id=artifact_id, bytes=nbytes, created=self._clock()))
        return True

    def artifact(self, key_id: str, artifact_id: str) -> OwnedArtifact | None:
        """One of a key's artifacts."""
        with self._database.reading() as session:
            found = session.get(ArtifactRow, (key_id, artifact_id))
            return None if found is None else _artifact(found)

    def artifacts(self, key_id: str) -> list[OwnedArtifact]:
        """A key's artifacts, by their ids."""
        with self._database.reading() as session:
            rows = select(ArtifactRow).where(ArtifactRow.key_id == key_id).order_by(ArtifactRow.artifact_id)
            return [_artifact(row) for row in session.scalars(rows)]

    def drop_artifact(self, key_id: str, artifact_id: str) -> int | None:
        """Let a key own it no more. How many keys still own it; None: this one did not."""
        mine = (ArtifactRow.key_id == key_id, ArtifactRow.artifact_id == artifact_id)
        with self._database.session() as session:
            self.artifact_quota.lock(session, key_id)
            nbytes = session.scalar(delete(ArtifactRow).where(*mine).returning(ArtifactRow.bytes))
            if nbytes is None:
                return None
            self.artifact_quota.give_back(session, key_id, nbytes)
            return session.scalar(select(func.count()).where(ArtifactRow.artifact_id == artifact_id)) or 0

    # --- files

    def add_file(self, key_id: str, filename: str, purpose: str, nbytes: int, sha256: str) -> OwnedFile:
        """Let a key own a file that has arrived whole; QuotaError where it has no room.

        E_BAD_PARAM for a name or a purpose that cannot be kept.
        """
        row = FileRow(
            id=f"file-{secrets.token_hex(12)}",
            key_id=key_id,
            filename=storable(filename, "filename"),
            purpose=storable(purpose, "purpose"),
            status="processed",
            bytes=nbytes,
            sha256=sha256,
            created=self._clock(),
        )
        with self._database.session() as session:
            self.file_quota.take(session, key_id, nbytes)
            session.add(row)
        return _file(row)

    def file(self, key_id: str, file_id: str) -> OwnedFile | None:
        """One of a key's files."""
        with self._database.reading() as session:
            row = session.scalar(select(FileRow).where(FileRow.id == file_id, FileRow.key_id == key_id))
            return None if row is None else _file(row)

    def files(self, key_id: str) -> list[OwnedFile]:
        """A key's files, newest first."""
        with self._database.reading() as session:
            rows = select(FileRow).where(FileRow.key_id == key_id).order_by(FileRow.created.desc(), FileRow.id)
            return [_file(row) for row in session.scalars(rows)]

    def drop_file(self, key_id: str, file_id: str) -> bool:
        """Forget a file. Whether it was this key's."""
        mine = (FileRow.id == file_id, FileRow.key_id == key_id)
        with self._database.session() as session:
            nbytes = session.scalar(delete(FileRow).where(*mine).returning(FileRow.bytes))
            if nbytes is not None:
                self.file_quota.give_back(session, key_id, nbytes)
        return nbytes is not None


def _artifact(row: ArtifactRow) -> OwnedArtifact:
    return OwnedArtifact(row.artifact_id, row.bytes, row.created)


def _file(row: FileRow) -> OwnedFile:
    return OwnedFile(row.id, row.filename, row.purpose, row.status, row.bytes, row.sha256, row.created)
