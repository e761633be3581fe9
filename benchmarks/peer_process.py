"""The parent's end of `peers/protocol.py`: one process per tool, alive for the whole run, asked in turn."""

import json
import os
import subprocess
from pathlib import Path

from environments import HERE, Tool, Unavailable, environment, folder_for, pinned
from measure import Timing
from safetensors.torch import load_file
from torch import Tensor


class LineProcess:
    """A process that answers JSON lines, alive for the whole run. Raises Unavailable if it does not come up."""

    def __init__(self, name: str, command: list, threads: int, scratch: Path, **variables: str) -> None:
        self.name = name
        self._rows_file = scratch / f"{name}.safetensors"
        self._log = scratch / f"{name}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=_environment_variables(threads) | variables,
            )
        self.ready = self._answer()
        self.versions: dict[str, str] = self.ready["versions"]

    def timed(self, **request: object) -> Timing:
        """Ask for a run, which is timed in the process itself."""
        return Timing(**self.ask({"do": "run", **request}))

    def tensors(self, **request: object) -> dict[tuple[int, int], Tensor]:
        """Ask for rows, which come in a file, by prompt and layer."""
        self.ask({"do": "rows", "file": str(self._rows_file), **request})
        tensors = load_file(self._rows_file)
        self._rows_file.unlink()
        return {_prompt_and_layer(name): rows for name, rows in tensors.items()}

    def close(self) -> None:
        """Let the process end: it does when its stdin does."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def ask(self, request: dict) -> dict:
        """Put one request; its answer. Raises Unavailable if the process ends."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = [one for one in self._log.read_text().splitlines() if one.strip()]
            raise Unavailable(said[-1] if said else f"{self.name} ended without a word")
        return json.loads(line)


class PeerProcess(LineProcess):
    """A tool in its own environment, with the model loaded and the prompts read.

    Raises Unavailable if the environment cannot be made or the process does not come up.
    """

    def __init__(
        self, tool: Tool, *, torch: str, model_folder: Path, prompts: Path, threads: int, scratch: Path
    ) -> None:
        given = [folder_for(tool, model_folder), prompts, threads]
        super().__init__(tool.name, [environment(tool, torch), HERE / "peers" / tool.script, *given], threads, scratch)
        self.modes: list[str] = self.ready["modes"]

    def run(self, mode: str, layers: list[int], count: int) -> Timing:
        """Capture from the first `count` prompts."""
        return self.timed(mode=mode, layers=layers, count=count)

    def rows(self, mode: str, layers: list[int], prompts: list[int]) -> dict[tuple[int, int], Tensor]:
        """Capture from all prompts, and return the rows of some, by prompt and layer."""
        return self.tensors(mode=mode, layers=layers, prompts=prompts)


def _prompt_and_layer(name: str) -> tuple[int, int]:
    prompt, layer = name.split(".")
    return int(prompt), int(layer)


def _environment_variables(threads: int) -> dict[str, str]:
    """This process's variables, less what would lead the tool out of its own environment."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return kept | pinned(threads) | {"HF_HUB_OFFLINE": "1"}
