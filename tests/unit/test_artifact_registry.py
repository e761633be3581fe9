"""The registry gives back what was put there or says what is wrong; its limit holds, and ids are never paths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors.numpy import load, save

from midstream.core.artifacts import Artifact, artifact_bytes
from midstream.core.errors import SpecError
from midstream.formats.artifacts import ArtifactRegistry, default_registry

ABSENT = f"sha256:{'0' * 64}"
FLOATS = arrays(
    np.float32,
    array_shapes(max_dims=3, max_side=4),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


@pytest.fixture
def registry(tmp_path: Path) -> ArtifactRegistry:
    return ArtifactRegistry(tmp_path / "artifacts")


def file_of(registry: ArtifactRegistry, artifact_id: str) -> Path:
    return registry.directory / f"{artifact_id[7:]}.safetensors"


def refused(code: str, call: Any, *given: Any, **named: Any) -> str:
    with pytest.raises(SpecError) as caught:
        call(*given, **named)
    assert caught.value.code == code
    assert "\n" not in str(caught.value)
    return str(caught.value)


def id_of(data: bytes) -> str:
    return f"sha256:{sha256(data).hexdigest()}"


def made(header: Any, data: bytes = b"\0" * 8) -> bytes:
    """A file of safetensors' form with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


# --- what comes back


@settings(deadline=None, max_examples=40)
@given(FLOATS)
def test_every_bit_comes_back(tmp_path_factory: pytest.TempPathFactory, array: np.ndarray[Any, Any]) -> None:
    registry = ArtifactRegistry(tmp_path_factory.mktemp("artifacts"))
    held = registry.put(array)
    assert held == Artifact.of(array).id == id_of(artifact_bytes(array))
    back = registry.get(held)
    assert back.id == held
    assert back.array is not None
    assert (back.array.shape, back.array.tobytes()) == (array.shape, array.tobytes())
    assert not back.array.flags.writeable
    assert registry.get_bytes(held) == artifact_bytes(array)
    assert registry.put(back) == registry.put_bytes(held, artifact_bytes(array)) == held
    assert [(one.id, one.shape, one.bytes) for one in registry.entries()] == [
        (held, array.shape, len(artifact_bytes(array)))
    ]


def test_the_file_is_what_the_contract_says(registry: ArtifactRegistry) -> None:
    held = registry.put([[1.0, 2.0]])
    data = file_of(registry, held).read_bytes()
    assert id_of(data) == held
    assert {name: array.tolist() for name, array in load(data).items()} == {"tensor": [[1.0, 2.0]]}


def test_what_may_be_put(registry: ArtifactRegistry) -> None:
    held = registry.put([1.0, 2.0])
    assert registry.put(torch.tensor([1.0, 2.0], dtype=torch.bfloat16)) == held
    assert registry.put(np.array([1, 2])) == registry.put(Artifact.of([1.0, 2.0])) == held
    assert registry.put(held) == registry.put(Artifact.of(held)) == held
    assert registry.ids() == (held,)
    refused("E_ARTIFACT_MISSING", registry.put, ABSENT)
    refused("E_BAD_PARAM", registry.put, [])
    refused("E_BAD_PARAM", registry.put, [float("nan")])
    refused("E_BAD_PARAM", registry.put, None)
    refused("E_BAD_PARAM", registry.put, Artifact(array=np.array([np.inf], dtype=np.float32)))
    message = refused("E_BAD_PARAM", registry.put, [1e60], "ops[0].vector")
    assert message.startswith("E_BAD_PARAM at ops[0].vector: ")


def test_an_artifact_under_the_id_of_another(registry: ArtifactRegistry) -> None:
    other = registry.put([3.0])
    array = np.array([1.0], dtype=np.float32)
    refused("E_ARTIFACT_HASH", registry.put, Artifact(other, array))
    refused("E_ARTIFACT_MISSING", registry.put, Artifact(ABSENT, array))
    assert registry.ids() == (other,)


def test_a_file_that_another_program_wrote(registry: ArtifactRegistry) -> None:
    """One tensor may have several files, by blanks in the header; each is an artifact with an id of its own."""
    head = b'{ "tensor": {"shape":[2], "dtype":"F32", "data_offsets":[0,8]} }'
    data = made(head, np.array([1, 2], dtype="<f4").tobytes())
    foreign = registry.put_bytes(id_of(data), data)
    assert foreign != registry.put([1.0, 2.0])
    back = registry.get(foreign)
    assert back.array is not None
    assert back.array.tolist() == [1, 2]
    assert registry.put(back) == foreign
    assert registry.get_bytes(foreign) == data
    assert len(registry.ids()) == 2


def test_listing_is_sorted_and_passes_over_what_is_not_an_artifact(registry: ArtifactRegistry) -> None:
    assert registry.ids() == registry.entries() == ()
    assert registry.used_bytes() == 0
    assert not registry.directory.exists()  # reading makes nothing
    ids = sorted(registry.put([float(n)] * (n + 1)) for n in range(5))
    for name in ("notes.txt", f"{'0' * 63}.safetensors", f"{'A' * 64}.safetensors", ".midstream-ab.tmp"):
        (registry.directory / name).write_bytes(b"x")
    (registry.directory / f"{'1' * 64}.safetensors").mkdir()
    assert list(registry.ids()) == [one.id for one in registry.entries()] == ids
    assert registry.used_bytes() == sum(one.bytes for one in registry.entries())
    assert {one.shape for one in registry.entries()} == {(n + 1,) for n in range(5)}


def test_contains_and_delete(registry: ArtifactRegistry) -> None:
    held = registry.put([1.0])
    assert held in registry
    assert Artifact.of([1.0]) in registry
    assert ABSENT not in registry
    assert 7 not in registry
    registry.delete(held)
    assert held not in registry
    message = refused("E_ARTIFACT_MISSING", registry.delete, held, path="id")
    assert message.startswith("E_ARTIFACT_MISSING at id: no artifact sha256:")
    message = refused("E_ARTIFACT_MISSING", registry.get, held)
    assert "put its array first" in message


def test_nothing_is_made_for_a_deletion(registry: ArtifactRegistry) -> None:
    refused("E_ARTIFACT_MISSING", registry.delete, ABSENT)
    assert not registry.directory.exists()


# --- what is damaged


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "more"])
def test_an_altered_file(registry: ArtifactRegistry, damage: str) -> None:
    held = registry.put([1.0, 2.0])
    file = file_of(registry, held)
    data = file.read_bytes()
    file.write_bytes({"flip": data[:-1] + b"\x41", "cut": data[:-4], "empty": b"", "more": data + b"\0"}[damage])
    assert held in registry
    for call in (registry.get, registry.get_bytes):
        assert "put the artifact again, or delete it" in refused("E_ARTIFACT_HASH", call, held)
    assert registry.entries()[0].id == held  # a listing survives it
    assert registry.put([1.0, 2.0]) == held
    assert file.read_bytes() == data
    file.write_bytes(b"")
    assert registry.entries()[0].shape is None
    registry.delete(held)
    assert registry.ids() == ()


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
NO_ARTIFACTS = {
    "metadata": made({"tensor": ONE, "__metadata__": {"a": "b"}}),
    "empty metadata": made({"__metadata__": {}, "tensor": ONE}),
    "another name": save({"vector": np.zeros(2, dtype=np.float32)}),
    "two": save({"tensor": np.zeros(2, dtype=np.float32), "other": np.zeros(2, dtype=np.float32)}),
    "no tensor": save({}),
    "half": made({"tensor": {**ONE, "dtype": "BF16", "shape": [4]}}),
    "integers": made({"tensor": {**ONE, "dtype": "I32"}}),
    "not finite": save({"tensor": np.array([0, np.nan], dtype=np.float32)}),
    "empty tensor": made({"tensor": {**ONE, "shape": [0], "data_offsets": [0, 0]}}, b""),
    "many dimensions": made({"tensor": {**ONE, "shape": [1] * 70, "data_offsets": [0, 4]}}, b"\0" * 4),
    "a hole": made({"tensor": {**ONE, "data_offsets": [4, 12]}}, b"\0" * 12),
    "more bytes": made({"tensor": ONE}, b"\0" * 9),
    "too few bytes": made({"tensor": ONE}, b"\0" * 7),
    "a huge header": (1 << 60).to_bytes(8, "little"),
    "a list": made([ONE]),
    "no JSON": made(b"{tensor"),
    "a pickle": b"\x80\x04\x95\x01\x00\x00\x00\x00\x00\x00\x00N.",
    "nothing": b"",
}


@pytest.mark.parametrize("what", NO_ARTIFACTS)
def test_bytes_that_are_no_artifact(registry: ArtifactRegistry, what: str) -> None:
    data = NO_ARTIFACTS[what]
    refused("E_BAD_PARAM", registry.put_bytes, id_of(data), data)
    assert not registry.directory.exists()
    registry.put([1.0])
    file_of(registry, id_of(data)).write_bytes(data)  # put there by other means, under its own hash
    refused("E_BAD_PARAM", registry.get, id_of(data))
    assert len(registry.entries()) == 2


def test_bytes_of_another_id(registry: ArtifactRegistry) -> None:
    data = artifact_bytes(np.ones(2, dtype=np.float32))
    assert id_of(data) in refused("E_ARTIFACT_HASH", registry.put_bytes, ABSENT, data)
    refused("E_ARTIFACT_HASH", registry.put_bytes, id_of(data), data[:-1])
    assert not registry.directory.exists()


@pytest.mark.parametrize(
    "strange",
    [
        "../../etc/passwd",
        f"sha256:../{'0' * 61}",
        f"sha256:{'0' * 64}\n",
        f"sha256:{'0' * 64}/../x",
        f"sha256:{'0' * 63}\0",
        f"sha256:{'A' * 64}",
        f"sha256:{'٣' * 64}",
        f"SHA256:{'0' * 64}",
        "0" * 64,
        "",
        None,
        Path("/etc/passwd"),
    ],
)
def test_ids_are_never_paths(registry: ArtifactRegistry, strange: Any) -> None:
    registry.put([1.0])
    before = sorted(registry.directory.parent.rglob("*"))
    data = artifact_bytes(np.ones(2, dtype=np.float32))
    refused("E_BAD_PARAM", registry.put_bytes, strange, data)
    for call in (registry.get, registry.get_bytes, registry.delete):
        assert len(refused("E_BAD_PARAM", call, strange)) < 250
    if isinstance(strange, str):
        refused("E_BAD_PARAM", registry.put, strange)
    assert strange not in registry
    assert sorted(registry.directory.parent.rglob("*")) == before


# --- the limit


def test_the_limit(tmp_path: Path) -> None:
    size = len(artifact_bytes(np.zeros(4, dtype=np.float32)))
    registry = ArtifactRegistry(tmp_path, max_bytes=2 * size)
    first, second = registry.put([0.0] * 4), registry.put([1.0] * 4)
    message = refused("E_SPEC_TOO_LARGE", registry.put, [2.0] * 4, "ops[1].vector")
    assert f"needs {size} bytes, and {2 * size} of the registry's {2 * size} are used" in message
    assert "delete(id)" in message
    assert registry.put([1.0] * 4) == second  # what is held needs no room
    file_of(registry, second).write_bytes(b"x" * 2 * size)
    assert registry.put([1.0] * 4) == second  # and what is damaged is replaced
    registry.delete(first)
    third = registry.put([2.0] * 4)
    assert set(registry.ids()) == {second, third}
    assert registry.used_bytes() == 2 * size


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "1GB", None])
def test_a_limit_that_is_none(tmp_path: Path, limit: Any) -> None:
    refused("E_BAD_PARAM", ArtifactRegistry, tmp_path, limit)


# --- several at once, and killed ones


def test_threads_at_one_directory(tmp_path: Path) -> None:
    """Sixteen writers, eight arrays, room for five: five are held, whole, and the limit held all the time."""
    size = len(artifact_bytes(np.zeros(4, dtype=np.float32)))

    def put(number: int) -> str:
        try:
            return ArtifactRegistry(tmp_path, max_bytes=5 * size).put([float(number % 8)] * 4)
        except SpecError as error:
            return error.code

    with ThreadPoolExecutor(16) as pool:
        done = set(pool.map(put, range(16)))
    registry = ArtifactRegistry(tmp_path)
    assert done == {*registry.ids(), "E_SPEC_TOO_LARGE"}
    assert len(registry.ids()) == 5
    assert all(registry.get(held).id == held for held in registry.ids())
    assert {file.name for file in tmp_path.iterdir() if not file.name.endswith(".safetensors")} == {".lock"}


WRITER = """
import sys
from midstream.formats.artifacts import ArtifactRegistry
registry = ArtifactRegistry(sys.argv[1])
for number in range(20):
    registry.get(registry.put([float(number)] * 8))
assert "torch" not in sys.modules
"""


def test_processes_at_one_directory(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)]) for _ in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    registry = ArtifactRegistry(tmp_path)
    assert len(registry.ids()) == 20
    assert all(registry.get(held).id == held for held in registry.ids())


def test_what_killed_writers_left(registry: ArtifactRegistry) -> None:
    registry.put([1.0])
    old, new, foreign = (registry.directory / name for name in (".midstream-1.tmp", ".midstream-2.tmp", "old.tmp"))
    for file in (old, new, foreign):
        file.write_bytes(b"half")
    for file in (old, foreign):
        os.utime(file, (0, 0))
    registry.put([2.0])
    assert not old.exists()
    assert new.exists()  # its writer may be at it
    assert foreign.exists()


def test_a_full_disk(registry: ArtifactRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    held = registry.put([1.0])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        registry.put([2.0])
    assert registry.ids() == (held,)
    assert sorted(file.name for file in registry.directory.iterdir()) == sorted([".lock", f"{held[7:]}.safetensors"])


def test_directories_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        registry = ArtifactRegistry(directory)
        with pytest.raises(NotADirectoryError, match="choose another"):
            registry.put([1.0])
        assert registry.ids() == ()
        refused("E_ARTIFACT_MISSING", registry.get, ABSENT)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_directory_without_rights(registry: ArtifactRegistry) -> None:
    registry.directory.mkdir(mode=0o500)
    with pytest.raises(PermissionError, match="no right to write into"):
        registry.put([1.0])


def test_the_directory_stays_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    registry = ArtifactRegistry("here")
    held = registry.put([1.0])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert held in registry


def test_the_registry_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_registry().directory == tmp_path / "midstream" / "artifacts"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_registry().directory == tmp_path / ".cache" / "midstream" / "artifacts"


def test_a_file_that_arrives_piece_by_piece(tmp_path: Path) -> None:
    data = artifact_bytes(np.arange(64, dtype=np.float32))
    name = f"sha256:{sha256(data).hexdigest()}"
    registry = ArtifactRegistry(tmp_path, max_bytes=len(data) + 10)
    with registry.receiving(name) as upload:
        for start in range(0, len(data), 50):
            upload.take(data[start : start + 50])
        assert name not in registry, "it is not whole"
        upload.keep()
    assert registry.get_bytes(name) == data
    with registry.receiving(name) as upload:
        upload.take(data[:20])  # and no more comes
    with registry.receiving(name) as upload:
        upload.take(data[:-1])
        with pytest.raises(SpecError, match="E_ARTIFACT_HASH"):
            upload.keep()
    upload = registry.receiving(f"sha256:{'0' * 64}", "here")
    with upload, pytest.raises(SpecError, match=r"E_SPEC_TOO_LARGE at here: .* has more than 10 bytes, which are left"):
        upload.take(data)
    assert [one.name for one in tmp_path.glob("*.safetensors")] == [f"{name[7:]}.safetensors"]
    assert not list(tmp_path.glob("*.tmp"))
