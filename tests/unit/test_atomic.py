"""Files appear whole or not at all; errors leave what was there, and nothing else."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from midstream.core.errors import FileFormatError
from midstream.formats import atomic, tensor_file
from midstream.formats.atomic import replacing
from midstream.formats.tensor_file import write
from unit.captures import bits


def test_a_new_file_and_a_replaced_one(tmp_path: Path) -> None:
    target = tmp_path / "a.bin"
    for content in (b"first", b"second"):
        with replacing(target) as temporary:
            assert temporary.parent == tmp_path
            temporary.write_bytes(content)
            assert not target.exists() or target.read_bytes() == b"first"
        assert target.read_bytes() == content
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_an_error_in_the_block(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "a.bin"
    target.write_bytes(b"old")

    def half_way() -> None:
        with replacing(target) as temporary:
            temporary.write_bytes(b"half")
            raise error

    with pytest.raises(type(error)):
        half_way()
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_an_error_while_putting_it_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    target = tmp_path / "a.bin"
    target.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(atomic.os, step, fail)
    with pytest.raises(OSError, match="Input/output"), replacing(target) as temporary:
        temporary.write_bytes(b"new")
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_bytes_then_name_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's bytes reach the disk before its name does, and the directory after."""
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def seen_fsync(descriptor: int) -> None:
        steps.append("flush directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "flush file")
        fsync(descriptor)

    def seen_replace(source: Path, target: Path) -> None:
        steps.append("replace")
        replace(source, target)

    monkeypatch.setattr(atomic.os, "fsync", seen_fsync)
    monkeypatch.setattr(atomic.os, "replace", seen_replace)
    write(tmp_path / "a.safetensors", {"x": torch.ones(2)}, {})
    assert steps == ["flush file", "replace", "flush directory"]


def test_permissions_are_kept_and_new_ones_follow_the_umask(tmp_path: Path) -> None:
    private, new = tmp_path / "private", tmp_path / "new"
    private.write_bytes(b"")
    private.chmod(0o600)
    old = os.umask(0o027)
    try:
        for path in (private, new):
            write(path, {"x": torch.ones(2)}, {})
    finally:
        os.umask(old)
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert stat.S_IMODE(new.stat().st_mode) == 0o640


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link, real = tmp_path / "link", tmp_path / "elsewhere" / "real"
    link.symlink_to(real)
    with replacing(link) as temporary:
        assert temporary.parent == real.parent
        temporary.write_bytes(b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"


def test_a_name_as_long_as_names_may_be(tmp_path: Path) -> None:
    target = tmp_path / ("n" * 255)
    with replacing(target) as temporary:
        temporary.write_bytes(b"x")
    assert target.exists()


def refused(path: Path, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        write(path, {"x": torch.ones(2)}, {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_paths_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "mkdir -p" in refused(tmp_path / "missing" / "a", FileNotFoundError)
    assert "name a file in it" in refused(tmp_path, IsADirectoryError)
    (tmp_path / "file").write_bytes(b"")
    assert "is not a directory" in refused(tmp_path / "file" / "a", NotADirectoryError)
    assert "ordinary file" in refused(Path(os.devnull), OSError)
    assert Path(os.devnull).is_char_device()
    os.mkfifo(tmp_path / "pipe")
    assert "ordinary file" in refused(tmp_path / "pipe", OSError)

    def no_right(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(atomic.os, "open", no_right)
    assert "no right to write into" in refused(tmp_path / "a", PermissionError)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_directory_without_rights(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "no right to write into" in refused(tmp_path / "a", PermissionError)
    tmp_path.chmod(0o300)  # may be written into but not opened, and so not flushed
    write(tmp_path / "a", {"x": torch.ones(2)}, {})
    tmp_path.chmod(0o700)
    assert (tmp_path / "a").exists()


FULL_DISK = """
import resource, sys, torch
from midstream.formats.tensor_file import write
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # what a full disk looks like to one process
try:
    write(sys.argv[1], {"x": torch.ones(100_000)}, {})
except OSError as error:
    sys.stdout.write(str(error))
"""


def test_a_full_disk(tmp_path: Path) -> None:
    target = tmp_path / "a.safetensors"
    write(target, {"x": torch.zeros(2)}, {})
    done = subprocess.run([sys.executable, "-c", FULL_DISK, target], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"cannot write {target}: ")
    assert done.stdout.count("\n") == 0
    assert load_file(target)["x"].tolist() == [0, 0]
    assert list(tmp_path.iterdir()) == [target]


def test_views_shared_storage_and_strides(tmp_path: Path) -> None:
    """A view is written as what it shows; overlapping ones are written each for itself."""
    whole = torch.arange(100_000, dtype=torch.float32).reshape(1000, 100)
    tensors = {
        "head": whole[:2],
        "overlapping": whole[1:3],
        "same": whole[:2],
        "columns": whole[:3, ::2],
        "none": whole[:0],
        "one": whole[5:6, 7:8],
    }
    path = write(tmp_path / "a.safetensors", tensors, {})
    assert path.stat().st_size < 4000
    back = load_file(path)
    assert {name: bits(tensor) for name, tensor in back.items()} == {
        name: bits(tensor.contiguous()) for name, tensor in tensors.items()
    }


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    tensors = {name: torch.arange(3.0) for name in "dacb"}
    one = write(tmp_path / "1", tensors, {"midstream": {"b": 1, "a": [2]}}).read_bytes()
    other = write(tmp_path / "2", tensors, {"midstream": {"b": 1, "a": [2]}}).read_bytes()
    assert one == other


def test_texts_larger_than_a_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "HEADER_LIMIT", 1000)
    write(tmp_path / "a", {}, {"k": "x" * 900})
    with pytest.raises(FileFormatError, match="save fewer prompts in one file") as caught:
        write(tmp_path / "a", {}, {"k": "x" * 1100})
    assert "\n" not in str(caught.value)
    with safe_open(tmp_path / "a", "pt") as file:
        assert len(file.metadata()["k"]) == 902
