"""How much a key may keep, in bytes; counted where it is kept, in the same transaction."""

from __future__ import annotations

from typing import Final, Literal

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from .errors import ApiError
from .storage.tables import KeyRow

Kind = Literal["artifact", "file", "result"]

_COLUMNS: Final = {
    "artifact": KeyRow.artifact_bytes,
    "file": KeyRow.file_bytes,
    "result": KeyRow.result_bytes,
}
_DELETE: Final = {"artifact": "artifacts", "file": "files", "result": "jobs"}


class QuotaError(ApiError):
    """More bytes than a key may keep."""

    def __init__(self, kind: Kind, needed: int, left: int) -> None:
        message = f"{needed} bytes, and the key may keep {left} more: delete {_DELETE[kind]} that are not needed"
        super().__init__(413, message)
        self.needed, self.left = needed, left


class Quota:
    """Of one kind of thing, `max_bytes` for each key."""

    def __init__(self, kind: Kind, max_bytes: int) -> None:
        self.kind: Final[Kind] = kind
        self.max_bytes: Final = max_bytes
        self._column = _COLUMNS[kind]

    def take(self, session: Session, key_id: str, nbytes: int, anyway: bool = False) -> None:
        """Count bytes that are kept from now on; QuotaError where there is no room, unless `anyway`."""
        taken = update(KeyRow).where(KeyRow.id == key_id).values({self._column: self._column + nbytes})
        if not anyway:
            taken = taken.where(self._column + nbytes <= self.max_bytes)
        if session.execute(taken.returning(KeyRow.id)).one_or_none() is None:
            raise QuotaError(self.kind, nbytes, self.room(session, key_id))

    def lock(self, session: Session, key_id: str) -> None:
        """Until the transaction ends, nobody else takes or gives back what is this key's."""
        session.execute(select(KeyRow.id).where(KeyRow.id == key_id).with_for_update(key_share=True))

    def give_back(self, session: Session, key_id: str, nbytes: int) -> None:
        """Bytes that are kept no more."""
        session.execute(update(KeyRow).where(KeyRow.id == key_id).values({self._column: self._column - nbytes}))

    def room(self, session: Session, key_id: str) -> int:
        """How many bytes are left."""
        used = session.scalar(select(self._column).where(KeyRow.id == key_id)) or 0
        return max(0, self.max_bytes - used)
