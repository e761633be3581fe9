"""Keys: who may do what. A secret is shown once, when it is made; only its hash is kept."""

from __future__ import annotations

import hmac
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, Literal, get_args

from sqlalchemy import exists, select, update
from sqlalchemy.exc import IntegrityError

from midstream.core.errors import choices, spec_error

from .storage import Database, storable
from .storage.tables import KeyRow, UsageRow

Scope = Literal["complete", "capture", "steer", "harvest", "admin"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
USUAL: Final[tuple[Scope, ...]] = ("complete", "capture", "steer", "harvest")
"""What a key may do where its maker says nothing."""

_ANONYMOUS: Final = "anonymous"
_SECRET: Final = re.compile(r"(ms-[0-9a-f]{12})-[A-Za-z0-9_-]{43}", re.ASCII)
_NOBODY: Final = sha256(b"").hexdigest()
"""Compared with where no key has the prefix, so that this takes as long."""


@dataclass(frozen=True)
class Key:
    """A key as it is shown: nothing of it is secret. prefix: how its secret begins. budget: None is no limit."""

    id: str
    prefix: str
    name: str
    scopes: frozenset[Scope]
    created: float
    revoked_at: float | None
    budget: int | None

    def may(self, scope: Scope) -> bool:
        """Whether it has a scope; none of them implies another."""
        return scope in self.scopes


class Keys:
    """The keys of a database."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock

    def create(self, name: str, scopes: Iterable[str] = USUAL, budget: int | None = None) -> tuple[Key, str]:
        """A new key and its secret, which nobody can show again.

        Raises E_BAD_PARAM for an unknown scope, for none, for a budget below 0, and for a name that cannot be kept.
        """
        wanted = as_scopes(scopes)
        if budget is not None and budget < 0:
            raise spec_error("E_BAD_PARAM", "budget", f"must be 0 tokens or more, got {budget}")
        prefix = f"ms-{secrets.token_hex(6)}"
        secret = f"{prefix}-{secrets.token_urlsafe(32)}"
        row = KeyRow(
            id=f"key-{secrets.token_hex(8)}", prefix=prefix, hash=_hash(secret), name=storable(name, "name"),
            scopes=",".join(wanted), created=self._clock(), budget=budget,
        )  # fmt: skip
        self._add(row)
        return _key(row), secret

    def find(self, secret: str) -> Key | None:
        """The key of a secret; None: there is none, or it was revoked."""
        form = _SECRET.fullmatch(secret)
        if form is None:
            return None
        with self._database.reading() as session:
            row = session.scalar(select(KeyRow).where(KeyRow.prefix == form[1]))
        same = hmac.compare_digest(_hash(secret), _NOBODY if row is None else row.hash)
        return _key(row) if row is not None and same and row.revoked_at is None else None

    def get(self, key_id: str) -> Key | None:
        """The key of an id, revoked or not."""
        with self._database.reading() as session:
            row = session.get(KeyRow, key_id)
        return None if row is None else _key(row)

    def list(self) -> Sequence[Key]:
        """Every key that was created, revoked ones too, oldest first."""
        with self._database.reading() as session:
            made = select(KeyRow).where(KeyRow.id != _ANONYMOUS).order_by(KeyRow.created, KeyRow.id)
            return [_key(row) for row in session.scalars(made)]

    def revoke(self, key_id: str) -> Key | None:
        """Let a key open nothing any more; what it owns stays its own. None: there is no such key."""
        if key_id == _ANONYMOUS:
            return None
        with self._database.session() as session:
            still = (KeyRow.id == key_id, KeyRow.revoked_at.is_(None))
            session.execute(update(KeyRow).where(*still).values(revoked_at=self._clock()))
            row = session.get(KeyRow, key_id)
        return None if row is None else _key(row)

    def any(self) -> bool:
        """Whether a key was ever created: one that is revoked still keeps a server from being open to all."""
        with self._database.reading() as session:
            return bool(session.scalar(select(exists().where(KeyRow.id != _ANONYMOUS))))

    def anonymous(self) -> Key:
        """Who owns what is made where there are no keys: every scope and no budget; no secret is its."""
        found = self.get(_ANONYMOUS)
        if found is None:
            row = KeyRow(
                id=_ANONYMOUS, prefix=_ANONYMOUS, hash="", name=_ANONYMOUS, scopes=",".join(SCOPES),
                created=self._clock(),
            )  # fmt: skip
            with suppress(IntegrityError):  # another was quicker
                self._add(row)
            found = _key(row)
        return found

    def _add(self, row: KeyRow) -> None:
        with self._database.session() as session:
            session.add(row)
            session.flush()
            session.add(UsageRow(key_id=row.id))


def as_scopes(given: Iterable[str], path: str = "scopes") -> tuple[Scope, ...]:
    """Some scopes, each once, in the order of SCOPES; E_BAD_PARAM at `path` for an unknown one, and for none."""
    wanted = list(given)
    for one in wanted:
        if one not in SCOPES:
            raise spec_error("E_BAD_PARAM", path, f"no scope {one!r:.40}; there are: {choices(SCOPES)}")
    if not wanted:
        raise spec_error("E_BAD_PARAM", path, f"a key has one scope or more, of: {choices(SCOPES)}")
    return tuple(one for one in SCOPES if one in wanted)


def _hash(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()


def _key(row: KeyRow) -> Key:
    known: Any = frozenset(row.scopes.split(",")) & frozenset(SCOPES)
    return Key(row.id, row.prefix, row.name, known, row.created, row.revoked_at, row.budget)
