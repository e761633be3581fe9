"""Files of a server: whole or not at all, under names of its own, and what a full disk says."""

from __future__ import annotations

import errno
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from midstream.server.errors import ApiError, StorageFullError, database_refusal
from midstream.server.files import Files, full_disk


def test_a_file_is_kept_whole(tmp_path: Path) -> None:
    files = Files(tmp_path / "files")
    with files.arriving(10) as file:
        file.take(b"hello")
        file.keep("file-00000001")
        assert file.sha256 == sha256(b"hello").hexdigest()
    assert files.path("file-00000001").read_bytes() == b"hello"
    files.delete("file-00000001")
    files.delete("file-00000001")
    assert list(files.directory.iterdir()) == []


def test_what_does_not_arrive_leaves_nothing(tmp_path: Path) -> None:
    files = Files(tmp_path / "files")
    with pytest.raises(ApiError, match="more than 4 bytes") as caught, files.arriving(4) as file:
        file.take(b"hello")
    assert caught.value.status == 413
    with files.arriving(10) as file:
        file.take(b"hello")  # whoever sent it goes away
    assert list(files.directory.iterdir()) == []


def test_what_a_killed_server_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / ".arriving-abc").write_bytes(b"half")
    assert list(Files(tmp_path / "files").directory.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["../passwd", "file-", "file-zz", "/etc/passwd", "file-00000001/..", "", "file-0000000a\n"]
)
def test_no_other_name_is_a_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ApiError) as caught:
        Files(tmp_path / "files").path(name)
    assert caught.value.status == 404


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    files = Files(tmp_path / "files")
    monkeypatch.setattr("midstream.server.files.os.fsync", full)
    with files.arriving(10) as file:
        file.take(b"hello")
        with pytest.raises(StorageFullError) as caught:
            file.keep("file-00000001")
    assert caught.value.status == 507
    assert list(files.directory.iterdir()) == []
    with pytest.raises(PermissionError), full_disk():
        raise PermissionError(errno.EACCES, "no")


def test_a_database_that_is_full_or_away() -> None:
    def failed(words: str) -> OperationalError:
        return OperationalError("INSERT", {}, Exception(words))

    assert database_refusal(failed("database or disk is full")).status == 507
    away = database_refusal(failed("server closed the connection unexpectedly"))
    assert away.status == 503
    assert away.headers() == {"retry-after": "5"}
    assert "INSERT" not in str(away)
