"""The ledger: tokens that keys hold, pay and have left. Every change is one transaction of the database."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Final, cast

from sqlalchemy import BigInteger, Table, bindparam, case, insert, or_, select, update
from sqlalchemy.orm import Session

from midstream.core.errors import MidstreamError

from .errors import BudgetError
from .storage import Database
from .storage.tables import EXPIRED, FREED, HELD, SETTLED, HoldRow, KeyRow, UsageRow


@dataclass(frozen=True)
class Budget:
    """The tokens of a key. budget and left: None where there is no limit; left is never below 0."""

    budget: int | None
    held: int
    spent: int
    left: int | None


@dataclass(frozen=True)
class Usage:
    """What was done for a key. rows, bytes: of activations."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    rows: int = 0
    bytes: int = 0


# Built once, for that takes longer than to run them, and on the tables: the ORM would treble the time of a request's
# two transactions. Each finds its rows by what they are at that moment.
_N: Final = bindparam("n", type_=BigInteger)
_HOLDS: Final = cast(Table, HoldRow.__table__)
_KEYS: Final = cast(Table, KeyRow.__table__)
_USAGE: Final = cast(Table, UsageRow.__table__)
_FITS: Final = or_(_KEYS.c.budget.is_(None), _KEYS.c.spent + _KEYS.c.held + _N <= _KEYS.c.budget)
_TAKE: Final = (
    update(_KEYS).where(_KEYS.c.id == bindparam("key"), _FITS).values(held=_KEYS.c.held + _N).returning(_KEYS.c.id)
)
_SET_ASIDE: Final = insert(_HOLDS)
_END: Final = (
    update(_HOLDS)
    .where(_HOLDS.c.id == bindparam("hold"), _HOLDS.c.state == HELD)
    .values(state=bindparam("becomes"), paid=case((_HOLDS.c.tokens < _N, _HOLDS.c.tokens), else_=_N))
    .returning(_HOLDS.c.key_id, _HOLDS.c.tokens, _HOLDS.c.paid)
)
_PAY: Final = (
    update(_KEYS)
    .where(_KEYS.c.id == bindparam("key"))
    .values(held=_KEYS.c.held - bindparam("tokens", type_=BigInteger), spent=_KEYS.c.spent + _N)
)
_USE: Final = (
    update(_USAGE)
    .where(_USAGE.c.key_id == bindparam("key"))
    .values({one.name: _USAGE.c[one.name] + bindparam(f"more_{one.name}") for one in fields(Usage)})
)


class Ledger:
    """What the keys of a database hold and have spent; threads and processes may each have one.

    At any moment, also after a crash, a key's `held` is the sum of its open holds' tokens and its `spent` the sum of
    what its settled holds paid. A hold that is not renewed ends with its lease; processes on several machines need
    clocks that agree to well within `lease_seconds`.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.time, lease_seconds: float = 60.0) -> None:
        self._database, self._clock, self.lease_seconds = database, clock, lease_seconds

    def hold(self, key_id: str, tokens: int, what: str) -> str:
        """Set tokens aside and give the hold's id; BudgetError when spent, held and these exceed the key's budget.

        Holds of this key whose lease has ended stand in nobody's way: they are expired first.
        """
        if tokens < 0:
            raise ValueError(f"a hold has 0 tokens or more, got {tokens}")
        try:
            return self._hold(key_id, tokens, what)
        except BudgetError:
            if not self.expire(key_id):
                raise
        return self._hold(key_id, tokens, what)

    def _hold(self, key_id: str, tokens: int, what: str) -> str:
        hold_id, now = f"hold-{secrets.token_hex(12)}", self._clock()
        hold = {"id": hold_id, "key_id": key_id, "what": what, "state": HELD, "tokens": tokens, "created": now}
        with self._database.session() as session:
            if session.execute(_TAKE, {"key": key_id, "n": tokens}).one_or_none() is None:
                raise BudgetError(tokens, _budget(session, key_id).left or 0)
            session.execute(_SET_ASIDE, {**hold, "lease_until": now + self.lease_seconds})
        return hold_id

    def settle(self, hold_id: str, paid: int, usage: Usage | None = None, session: Session | None = None) -> bool:
        """Pay from a hold and free the rest; add `usage` to the key's. Whether it was open, which it is once.

        One that was settled, freed or expired changes nothing. No more is paid than was held: a hold is the most
        that its work can use. session: a transaction to be part of; what is undone with it was not paid.
        """
        if paid < 0:
            raise ValueError(f"0 tokens or more are paid, got {paid}")
        with self._database.session(session) as own:
            key_id = self._end(own, hold_id, SETTLED, paid)
            if key_id is not None and usage is not None:
                add_usage(own, key_id, usage)
        return key_id is not None

    def free(self, hold_id: str, session: Session | None = None) -> bool:
        """Let go of a hold without paying. Whether it was open."""
        with self._database.session(session) as own:
            return self._end(own, hold_id, FREED) is not None

    def renew(self, hold_ids: Iterable[str]) -> int:
        """Begin the leases of open holds anew, now. How many of them were open."""
        with self._database.session() as session:
            still = (HoldRow.id.in_(sorted(hold_ids)), HoldRow.state == HELD)
            until = self._clock() + self.lease_seconds
            changed = session.execute(update(HoldRow).where(*still).values(lease_until=until).returning(HoldRow.id))
            return len(changed.all())

    def expire(self, key_id: str | None = None) -> int:
        """Free the holds, of all keys or of one, whose lease has ended. How many."""
        now = self._clock()
        late = select(HoldRow.id).where(HoldRow.state == HELD, HoldRow.lease_until <= now).order_by(HoldRow.id)
        with self._database.reading() as session:
            found = session.scalars(late if key_id is None else late.where(HoldRow.key_id == key_id)).all()
        ended = 0
        for hold_id in found:  # a transaction each: whoever locks several holds at once may lock another out
            with self._database.session() as session:
                ended += self._end(session, hold_id, EXPIRED, late=now) is not None
        return ended

    def budget(self, key_id: str) -> Budget:
        """The tokens of a key."""
        with self._database.reading() as session:
            return _budget(session, key_id)

    def set_budget(self, key_id: str, tokens: int | None) -> None:
        """How many tokens a key may spend in all, from its first on; None is no limit. What it holds stays held."""
        if tokens is not None and tokens < 0:
            raise ValueError(f"a budget has 0 tokens or more, got {tokens}")
        with self._database.session() as session:
            session.execute(update(KeyRow).where(KeyRow.id == key_id).values(budget=tokens))

    def usage(self, key_id: str) -> Usage:
        """What a key has used in all."""
        with self._database.reading() as session:
            found = session.get(UsageRow, key_id)
            return Usage(**{one.name: getattr(found, one.name) for one in fields(Usage)}) if found else Usage()

    @staticmethod
    def _end(session: Session, hold_id: str, state: str, paid: int = 0, late: float | None = None) -> str | None:
        """End an open hold (late: only if its lease had ended by then) and give its key; None: it was not open."""
        statement = _END if late is None else _END.where(_HOLDS.c.lease_until <= late)
        ended = session.execute(statement, {"hold": hold_id, "becomes": state, "n": paid}).one_or_none()
        if ended is None:
            return None
        session.execute(_PAY, {"key": ended.key_id, "tokens": ended.tokens, "n": ended.paid})
        return ended.key_id


def add_usage(session: Session, key_id: str, usage: Usage) -> None:
    """Add to what a key has used."""
    session.execute(_USE, {"key": key_id, **{f"more_{name}": count for name, count in asdict(usage).items()}})


def _budget(session: Session, key_id: str) -> Budget:
    found = session.execute(select(KeyRow.budget, KeyRow.held, KeyRow.spent).where(KeyRow.id == key_id)).one_or_none()
    if found is None:
        raise MidstreamError(f"no key {key_id}")
    budget, held, spent = found
    return Budget(budget, held, spent, None if budget is None else max(0, budget - spent - held))
