"""The shape of the source: imports go one way, modules stay small, and `import midstream` costs next to nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "midstream"
MODULES = sorted(PACKAGE.rglob("*.py"))

#: Each room, and the rooms that it may import besides itself. `` is the face: the modules of the package itself.
ROOMS = {
    "core": set[str](),
    "formats": {"core"},
    "taps": {"core"},
    "backends": {"taps", "formats", "core"},
    "": {"backends", "taps", "formats", "core"},
}
ABOVE = {room: {"", "backends", "taps", "formats", "core"} for room in ("harvest", "vectors", "conversations")}
ROOMS |= ABOVE
ROOMS |= {room: {*ABOVE, "", "backends", "taps", "formats", "core"} for room in ("cli", "server", "web", "compat")}
ROOMS["cli"] |= {"web", "server"}  # `inspect --heatmap` and `demo` draw

ENGINES = {"transformers", "vllm"}
#: The file methods of CaptureResult reach up for formats, inside functions; `ms.harvest` is a room of its own.
EXCEPTIONS = {("core/result.py", "formats"), ("__init__.py", "harvest")}
OUTSIDE_OF = {"core": {"numpy", "pydantic"}, "taps": {"torch", "numpy"}}
#: What core imports only when a function of it runs.
LAZY_IN_CORE = {
    "core/artifacts.py": {"safetensors"},  # an artifact is the bytes of such a file
    "core/probe.py": {"torch"},
    "core/prompts.py": {"jinja2"},
    "core/result.py": {"torch", "pandas"},
}


@dataclass(frozen=True)
class Import:
    """One import: the module in full, where it stands, and whether it runs when its module is imported."""

    file: str
    line: int
    target: str
    at_import: bool
    typing_only: bool

    @property
    def top(self) -> str:
        return self.target.partition(".")[0]

    @property
    def room(self) -> str | None:
        """The room of midstream that it is of; None for other packages."""
        return room_of(self.target.split(".")[1:]) if self.top == "midstream" else None


def room_of(parts: list[str]) -> str:
    """The room of a module below midstream; its own modules and names are the face."""
    return parts[0] if parts and parts[0] in ROOMS else ""


def imports_of(file: Path) -> Iterator[Import]:
    name = file.relative_to(PACKAGE).as_posix()
    package = ["midstream", *file.relative_to(PACKAGE).parent.parts]

    def walk(node: ast.AST, inside: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            targets: list[str] = []
            if isinstance(child, ast.Import):
                targets = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                origin = ".".join([*base, *([child.module] if child.module else [])])
                # `from midstream import formats` names a room too
                targets = [f"{origin}.{alias.name}" for alias in child.names]
            for target in targets:
                yield Import(name, child.lineno, target, not inside, typing_only)  # pyright: ignore
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            checking = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from walk(child, inside or function, typing_only or checking)

    yield from walk(ast.parse(file.read_text()), inside=False, typing_only=False)


IMPORTS = [found for file in MODULES for found in imports_of(file)]


def of(file: str) -> str:
    """The room of a file: a package of that name, or the face."""
    return room_of(file.removesuffix(".py").split("/"))


def test_the_source_was_read() -> None:
    assert {"core", "taps"} <= {of(found.file) for found in IMPORTS}
    assert ("core/result.py", "torch") in {(found.file, found.target) for found in IMPORTS}
    assert any(found.file == "taps/recorder.py" and found.room == "core" for found in IMPORTS)


def test_every_room_is_known() -> None:
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {"__pycache__"} <= set(ROOMS)


def test_arrows_go_one_way() -> None:
    wrong = [
        found
        for found in IMPORTS
        if found.room is not None
        and found.room != of(found.file)
        and found.room not in ROOMS[of(found.file)]
        and not ((found.file, found.room) in EXCEPTIONS and (found.typing_only or not found.at_import))
    ]
    assert wrong == []


def test_the_exceptions_are_used() -> None:
    """The three file methods of core/result.py, each inside its function."""
    reaching = [found for found in IMPORTS if of(found.file) == "core" and found.room == "formats"]
    assert {found.file for found in reaching} == {"core/result.py"}
    assert len(reaching) == 3
    assert not any(found.at_import for found in reaching)


def test_core_and_taps_import_little_else() -> None:
    wrong = [
        found
        for found in IMPORTS
        if found.at_import
        and not found.typing_only
        and found.top not in ("midstream", "__future__")
        and found.top not in sys.stdlib_module_names
        and found.top not in OUTSIDE_OF.get(of(found.file), {found.top})
    ]
    assert wrong == []


def test_core_imports_some_packages_in_functions_alone() -> None:
    lazy: dict[str, set[str]] = {}
    for found in IMPORTS:
        outside = found.top not in ("midstream", "__future__") and found.top not in sys.stdlib_module_names
        if of(found.file) == "core" and outside and not found.at_import:
            lazy.setdefault(found.file, set()).add(found.top)
    assert lazy == LAZY_IN_CORE


def test_engines_are_imported_by_backends_alone() -> None:
    outside = [found for found in IMPORTS if found.top in ENGINES and of(found.file) != "backends"]
    assert [found for found in outside if found.at_import and not found.typing_only] == []
    assert [found for found in outside if of(found.file) in ("core", "taps", "formats")] == []


def test_modules_are_small() -> None:
    lengths = {file.relative_to(PACKAGE).as_posix(): len(file.read_text().splitlines()) for file in MODULES}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_a_module_is_named_after_what_it_does() -> None:
    vague = ("util", "helper", "manager")
    assert [
        file.name for file in MODULES if any(word in part.lower() for word in vague for part in file.parts[-2:])
    ] == []


def test_no_import_of_another_rooms_private_module() -> None:
    wrong = [
        found
        for found in IMPORTS
        if found.room is not None
        and found.room != of(found.file)
        and any(part.startswith("_") and not part.startswith("__") for part in found.target.split("."))
    ]
    assert wrong == []


# --- what it costs

FRESH = """
import sys, time
start = time.perf_counter()
import midstream
names = dir(midstream)
print(time.perf_counter() - start)
print(*sorted({"torch", "transformers", "vllm", "pandas", "safetensors"} & sys.modules.keys()))
"""


def test_import_midstream_is_light() -> None:
    runs = [
        subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(3)
    ]
    assert [run[1] for run in runs] == ["", "", ""]
    assert min(float(run[0]) for run in runs) < 0.5


@pytest.mark.parametrize("name", ["SelectSpec", "CaptureSpec", "GenerationParams", "SpecError", "CaptureResult"])
def test_plain_data_needs_no_engine(name: str) -> None:
    code = (
        f"import sys, midstream; midstream.{name}; print(sorted({{'torch', *{sorted(ENGINES)}}} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
