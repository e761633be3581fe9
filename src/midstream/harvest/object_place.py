"""A harvest in an object store, by fsspec: S3 and its kin, or any other file system that it knows."""

from __future__ import annotations

import json
import secrets
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

from midstream.core.errors import MidstreamError

from .manifest import MANIFEST, FileEntry
from .places import LOCK, busy, check_ours, entry_of, hash_of

_LEASE: Final = 60.0
"""Seconds for which the lock of a run that is gone keeps others out: a store has no lock that ends with a process."""
_RENEWED: Final = 15.0
_SETTLES: Final = 0.5
"""Seconds after which a lock that another wrote at the same time can be seen."""


class ObjectPlace:
    """Objects below a URL. What is written is made on this machine, and put there in one go, whole or not at all."""

    def __init__(self, url: str, fs: Any, root: str) -> None:
        self.url, self._fs, self._root = url.rstrip("/"), fs, root.rstrip("/")

    @classmethod
    def of(cls, url: str) -> ObjectPlace:
        """The place that a URL names; MidstreamError where what fsspec needs for it is not installed."""
        try:
            from fsspec.core import url_to_fs

            return cls(url, *url_to_fs(url))
        except (ImportError, ValueError) as error:
            raise MidstreamError(f"{url} cannot be reached: {' '.join(str(error).split())}") from None

    def __str__(self) -> str:
        return self.url

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    @cached_property
    def _scratch(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="midstream-")

    @contextmanager
    def locked(self) -> Generator[None]:
        """See Place. The lock is an object with a lease, which is renewed while this process lives."""
        if self.size(MANIFEST) is None:
            check_ours(self, self.names())
        mine = secrets.token_hex(8)
        other = self._holder()
        if other is not None and other["until"] > time.time():
            raise busy(self)
        self._hold(mine)
        time.sleep(_SETTLES)
        if (other := self._holder()) is None or other["owner"] != mine:
            raise busy(self)
        ended = Event()

        def renew() -> None:
            while not ended.wait(_RENEWED):
                self._hold(mine)

        renewing = Thread(target=renew, name="midstream-lease", daemon=True)
        renewing.start()
        try:
            yield
        finally:
            ended.set()
            renewing.join()
            self.remove(LOCK)

    def _holder(self) -> dict[str, Any] | None:
        try:
            return json.loads(self._fs.cat_file(self._at(LOCK)))
        except (FileNotFoundError, ValueError):
            return None

    def _hold(self, owner: str) -> None:
        self._fs.pipe_file(self._at(LOCK), json.dumps({"owner": owner, "until": time.time() + _LEASE}).encode())

    def put(self, name: str, write: Callable[[Path], object]) -> FileEntry:
        """See Place."""
        with tempfile.TemporaryDirectory(prefix="midstream-") as scratch:
            path = Path(scratch) / Path(name).name
            write(path)
            made = entry_of(path, name)
            self._fs.put_file(str(path), self._at(name))
        self._fs.invalidate_cache()
        return made

    def fetch(self, name: str) -> Path:
        """See Place; it is kept until this place is let go of."""
        path = Path(self._scratch.name) / f"{self._token(name)}-{Path(name).name}"
        if not path.exists():
            beside = path.with_name(f".{secrets.token_hex(4)}")
            self._fs.get_file(self._at(name), str(beside))
            beside.replace(path)
        return path

    def _token(self, name: str) -> str:
        """What changes when an object does: so that a kept file is not one that was replaced."""
        return "".join(one for one in str(self._fs.ukey(self._at(name))) if one.isalnum())[:32]

    def size(self, name: str) -> int | None:
        """See Place."""
        try:
            return int(self._fs.size(self._at(name)))
        except FileNotFoundError:
            return None

    def hashed(self, name: str) -> str:
        """See Place."""
        with self._fs.open(self._at(name), "rb") as file:
            return hash_of(file)

    def names(self) -> list[str]:
        """See Place."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(self._root)
        except FileNotFoundError:
            return []
        first = len(self._fs._strip_protocol(self._root)) + 1
        return [self._fs._strip_protocol(path)[first:] for path in found]

    def remove(self, name: str) -> None:
        """See Place."""
        self._fs.rm_file(self._at(name))
        self._fs.invalidate_cache()
