"""`midstream keys` and `midstream budgets`: what they print, and that each wrong line is one line with exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.server.keys import Keys
from midstream.server.ledger import Ledger, Usage
from unit.command import Run, runner
from unit.stores import opened


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return runner(capsys)


def test_a_key_is_made_listed_and_revoked(run: Run, tmp_path: Path) -> None:
    made = run("keys", "create", "ada", "--scope", "complete, capture", "--scope", "steer", "--budget", "5000")
    secret = made.out.strip()
    assert made.code == 0
    assert "made key-" in made.err
    assert "for ada: complete, capture, steer; this is the only time" in made.err
    with opened(tmp_path / "midstream") as database:
        key = Keys(database).find(secret)
    assert key is not None
    assert (key.scopes, key.budget) == ({"complete", "capture", "steer"}, 5000)
    listed = run("keys", "list")
    assert all(word in listed.out for word in (key.id, key.prefix, "complete,capture,steer", "ada"))
    assert secret not in listed.out
    assert run("keys", "list", "--json").json == {
        "keys": [
            {
                "id": key.id, "name": "ada", "prefix": key.prefix, "scopes": ["complete", "capture", "steer"],
                "budget": 5000, "created": key.created, "revoked_at": None,
            }
        ]
    }  # fmt: skip
    assert run("keys", "revoke", key.id).err == f"revoked {key.id} (ada)\n"
    assert run("keys", "revoke", key.id, "--json").json["revoked_at"] > key.created
    with opened(tmp_path / "midstream") as database:
        assert Keys(database).find(secret) is None


def test_a_key_as_json_has_its_secret(run: Run, tmp_path: Path) -> None:
    made = run("keys", "create", "bob", "--json", "--data-dir", tmp_path / "elsewhere").json
    assert made["scopes"] == ["complete", "capture", "steer", "harvest"]
    with opened(tmp_path / "elsewhere") as database:
        found = Keys(database).find(made["secret"])
    assert found is not None
    assert (found.id, found.budget) == (made["id"], None)


def test_a_database_by_its_url(run: Run, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/by_url.db"
    made = run("keys", "create", "eve", "--json", "--database", url).json
    assert [key["id"] for key in run("keys", "list", "--json", "--database", url).json["keys"]] == [made["id"]]


def test_budgets(run: Run, tmp_path: Path) -> None:
    key = run("keys", "create", "ada", "--json").json["id"]
    assert run("budgets", "set", key, "5000").err == f"{key}: 5,000 tokens left, 0 held, 0 spent\n"
    with opened(tmp_path / "midstream") as database:
        ledger = Ledger(database)
        ledger.settle(ledger.hold(key, 100, "one"), 70, Usage(requests=1, prompt_tokens=40, completion_tokens=30))
        ledger.hold(key, 10, "two")
    shown = run("budgets", "show", key, "--json").json
    assert shown == {
        "key": key, "name": "ada", "budget": 5000, "held": 10, "spent": 70, "left": 4920,
        "usage": {"requests": 1, "prompt_tokens": 40, "completion_tokens": 30, "rows": 0, "bytes": 0},
    }  # fmt: skip
    assert run("budgets", "show", "--json").json == {"budgets": [shown]}
    table = run("budgets", "show").out
    assert all(word in table for word in (key, "5,000", "10", "70", "4,920", "ada"))
    unlimited = run("budgets", "set", key, "none", "--json").json
    assert unlimited == {"key": key, "budget": None, "held": 10, "spent": 70, "left": None}
    assert "no limit" in run("budgets", "show", key).out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("keys", "list"), "no keys in {data}/midstream; type: midstream keys create NAME, or name a --data-dir"),
        (("budgets", "show"), "no keys in {data}/midstream; type: midstream keys create NAME, or name a --data-dir"),
        (
            ("keys", "revoke", "key-1"),
            "no keys in {data}/midstream; type: midstream keys create NAME, or name a --data-dir",
        ),
        (
            ("keys", "create", "ada", "--scope", "complete,root"),
            "E_BAD_PARAM at --scope: no scope 'root'; there are: complete, capture, steer, harvest, admin",
        ),
        (
            ("keys", "create", "ada", "--scope", ""),
            "E_BAD_PARAM at --scope: no scope ''; there are: complete, capture,",
        ),
        (("keys", "create"), "Missing argument 'NAME' (see midstream keys create --help)"),
        (("keys", "create", "ada", "--budget", "-1"), "Invalid value for '--budget'"),
        (("keys", "frobnicate"), "No such command 'frobnicate' (see midstream keys --help)"),
        (("budgets", "set", "key-1", "many"), "E_BAD_PARAM at TOKENS: is a number of tokens, or none, got 'many'"),
        (("budgets", "set", "key-1", "9" * 30), "E_BAD_PARAM at TOKENS: is a number of tokens, or none, got '999"),
    ],
)
def test_bad_lines(run: Run, tmp_path: Path, words: tuple[str, ...], line: str) -> None:
    found = run(*words)
    assert (found.code, found.out) == (2, "")
    assert found.err.startswith(f"midstream: {line.format(data=tmp_path)}")
    assert found.err.count("\n") == 1


@pytest.mark.parametrize(
    "words", [("keys", "revoke", "key-1"), ("budgets", "set", "key-1", "5"), ("budgets", "show", "key-1")]
)
def test_no_such_key(run: Run, words: tuple[str, ...]) -> None:
    run("keys", "create", "ada")
    found = run(*words)
    assert (found.code, found.out) == (2, "")
    assert found.err == "midstream: E_BAD_PARAM at KEY: no key 'key-1'; type: midstream keys list\n"


def test_a_database_that_cannot_be_opened(run: Run, tmp_path: Path) -> None:
    found = run("keys", "create", "ada", "--database", "postgresql+psycopg://me:hunter2@127.0.0.1:1/name")
    assert (found.code, found.out, found.err.count("\n")) == (1, "", 1)
    assert "cannot open the database" in found.err
    assert "hunter2" not in found.err
    (tmp_path / "midstream").write_text("a file")
    assert run("keys", "create", "ada").code == 2


@pytest.mark.parametrize("group", ["keys", "budgets"])
def test_a_group_alone_shows_its_help(run: Run, group: str) -> None:
    assert run(group).out == run(group, "--help").out
    assert f"midstream {group}" in run(group).out
