"""The documents agree with the code, and what they point at exists."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SLOW_TO_GENERATE = {"architectures.md"}  # loads a model of each architecture
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")
#: A block that runs: `<!-- run -->` stands before it.
RUN = re.compile(r"^<!-- run -->\n+```(python|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: What an expression is shown to be: `cap.rows(10).shape  # -> torch.Size([6, 576])`.
SHOWN = re.compile(r"# -> (.+)$")
NAMED_FILE = re.compile(r"`((?:src|tests|docs|benchmarks|examples)/[\w./-]*\w\.\w+)`")

by_name = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def slugs(page: Path) -> set[str]:
    """The anchors that the headings of a page get."""
    headings = re.findall(r"^#+ +(.+?) *#*$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", h)).strip().lower() for h in headings)
    return {re.sub(r"[-\s]+", "-", words) for words in plain}


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=pytest.mark.slow if p.name in SLOW_TO_GENERATE else ()) for p in PAGES],
    ids=lambda page: page.name,
)
def test_generated_parts_are_up_to_date(page: Path) -> None:
    """`make docs` would change nothing."""
    if "[[[cog" not in page.read_text():
        return
    done = subprocess.run(
        [sys.executable, "-m", "cogapp", "-I", "docs", "--check", str(page)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"run `make docs`\n{done.stdout}{done.stderr}"


@by_name
def test_links_resolve(page: Path) -> None:
    """Each link to a file of the project names one that exists, and a heading that is in it."""
    broken = []
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in slugs(file)):
            broken.append(target)
    assert not broken


@by_name
def test_named_files_exist(page: Path) -> None:
    """A file of the project that stands in the text between backticks exists."""
    assert not [name for name in NAMED_FILE.findall(page.read_text()) if not (ROOT / name).exists()]


@by_name
def test_python_blocks_compile(page: Path) -> None:
    """The Python in a page is Python."""
    text = page.read_text()
    for block in PYTHON.finditer(text):
        line = text.count("\n", 0, block.start(1))
        compile("\n" * line + block[1], str(page), "exec")


class _Checked(ast.NodeTransformer):
    """Makes each expression that a line shows the value of a call that compares the two."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        shown = SHOWN.search(self.lines[(node.end_lineno or 0) - 1])
        if shown is None:
            return node
        arguments = [node.value, ast.Constant(shown[1]), ast.Constant(node.lineno)]
        call = ast.Call(ast.Name("_compare", ast.Load()), arguments, [])
        return ast.fix_missing_locations(ast.copy_location(ast.Expr(ast.copy_location(call, node)), node))


def _compare(value: Any, shown: str, line: int) -> None:
    assert " ".join(repr(value).split()) == shown.strip(), f"line {line}"


def _run_python(page: Path, code: str, names: dict[str, Any]) -> None:
    tree = _Checked(code.splitlines()).visit(ast.parse(code, str(page)))
    exec(compile(tree, str(page), "exec"), names)


def _run_shell(code: str, directory: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=directory,
        env=os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{code}\n{done.stdout}{done.stderr}"


@pytest.mark.real_model
@pytest.mark.parametrize("page", [p for p in PAGES if RUN.search(p.read_text())], ids=lambda page: page.name)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks that are marked run as they stand, one after the other, and give what they show."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    names: dict[str, Any] = {"_compare": _compare, "__name__": page.stem}
    for block in RUN.finditer(text):
        if block[1] == "sh":
            _run_shell(block[2], tmp_path)
        else:
            _run_python(page, "\n" * text.count("\n", 0, block.start(2)) + block[2], names)


@pytest.mark.slow
def test_site_builds(tmp_path: Path) -> None:
    """The site builds without a warning (not with `--quiet`, under which mkdocs counts none)."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "index.html").is_file()
