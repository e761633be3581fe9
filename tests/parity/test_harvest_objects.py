"""Harvests in object stores: fsspec's memory, and a real server that speaks S3."""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import midstream as ms
from midstream import harvest
from midstream.core.errors import BusyError, MidstreamError
from midstream.harvest import HarvestSpec, OtherHarvestError, object_place
from unit.harvests import contents
from unit.tiny_checkpoint import save_tiny

TEXTS = [f"sample {number} " + "x" * (number % 11) for number in range(9)]
SPEC = HarvestSpec(capture=ms.CaptureSpec(layers=[1, 2]), shard_tokens=40)


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ms.LanguageModel]:
    with ms.load(save_tiny(tmp_path_factory.mktemp("tiny"))) as lm:
        yield lm


@pytest.fixture(scope="module")
def s3() -> Iterator[None]:
    """moto as a server in a process of its own, which s3fs finds by the environment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    patch = pytest.MonkeyPatch()
    for name, value in (
        ("AWS_ENDPOINT_URL", url),
        ("AWS_ACCESS_KEY_ID", "testing"),
        ("AWS_SECRET_ACCESS_KEY", "testing"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        patch.setenv(name, value)
    try:
        until = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(url, timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < until, "the S3 server did not come up"
                time.sleep(0.1)
        fsspec.filesystem("s3").mkdir("bucket")
        yield
    finally:
        server.terminate()
        server.wait()
        patch.undo()


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(object_place, "_SETTLES", 0.05)
    if request.param == "s3":
        request.getfixturevalue("s3")
    return f"{request.param}://bucket/{secrets.token_hex(4)}/acts"


def objects(url: str) -> dict[str, bytes]:
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return {path.rpartition("/acts/")[2]: fs.cat_file(path) for path in fs.find(root)}


def test_the_same_files_as_in_a_directory(lm: ms.LanguageModel, url: str, tmp_path: Path) -> None:
    report = harvest.run(lm, TEXTS, url, SPEC)
    harvest.run(lm, TEXTS, tmp_path / "out", SPEC)
    want = contents(tmp_path / "out")
    del want[".lock"]
    assert objects(url) == want
    assert report.made == report.shards > 2
    found, there = harvest.open(url), harvest.open(tmp_path / "out")
    assert torch.equal(found.rows(2)[:], there.rows(2)[:])
    assert torch.equal(found.sample(3)["resid_post.1"], there.sample(3)["resid_post.1"])
    assert not found.verify()
    assert harvest.run(lm, TEXTS, url, SPEC).made == 0
    with pytest.raises(OtherHarvestError):
        harvest.run(lm, TEXTS[1:], url, SPEC)


def test_damage_and_deaths(lm: ms.LanguageModel, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harvest.run(lm, TEXTS, url, SPEC)
    want = objects(url)
    fs, root = fsspec.core.url_to_fs(url)
    fs.rm_file(f"{root}/shards/000001.safetensors")
    fs.pipe_file(f"{root}/shards/000002.safetensors", want["shards/000002.safetensors"][:-4] + b"abcd")
    assert harvest.open(url).verify() == ["shards/000001.safetensors", "shards/000002.safetensors"]
    assert harvest.run(lm, TEXTS, url, SPEC).made == 2
    assert objects(url) == want
    real: Any = object_place.ObjectPlace.put
    other = url.replace("/acts", "-2/acts")
    for dies_at in range(1, 9):
        count = 0

        def put(self: Any, name: str, write: Any) -> Any:
            nonlocal count
            count += 1
            if count == dies_at:  # noqa: B023 (called within the loop)
                raise KeyboardInterrupt
            return real(self, name, write)

        monkeypatch.setattr(object_place.ObjectPlace, "put", put)
        with pytest.raises(KeyboardInterrupt):
            harvest.run(lm, TEXTS, other, SPEC)
        monkeypatch.setattr(object_place.ObjectPlace, "put", real)
        harvest.run(lm, TEXTS, other, SPEC)
        assert objects(other) == want
        fs.rm(other.partition("://")[2].rpartition("/acts")[0], recursive=True)


def test_the_lease_of_a_run(lm: ms.LanguageModel, url: str) -> None:
    fs, root = fsspec.core.url_to_fs(url)

    def hold(until: float) -> None:
        fs.pipe_file(f"{root}/.lock", json.dumps({"owner": "another", "until": until}).encode())

    hold(time.time() + 30)
    with pytest.raises(BusyError, match="another harvest runs in"):
        harvest.run(lm, TEXTS, url, SPEC)
    hold(time.time() - 1)
    harvest.run(lm, TEXTS, url, SPEC)
    assert ".lock" not in objects(url)


def test_places_that_are_none(lm: ms.LanguageModel, url: str) -> None:
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/thesis.tex", b"dear")
    with pytest.raises(FileExistsError, match=r"holds thesis\.tex and no harvest"):
        harvest.run(lm, TEXTS, url, SPEC)
    with pytest.raises(FileNotFoundError, match="no harvest in"):
        harvest.open(url)
    with pytest.raises(MidstreamError, match="nix://a cannot be reached"):
        harvest.open("nix://a")
