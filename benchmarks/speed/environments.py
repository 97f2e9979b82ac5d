"""A virtual environment for each peer, from the exact versions in its requirements file.

A line `# no-deps: NAME==VERSION` in it is a package to install without what its metadata asks for.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parent / "tools"


def ready_python(tool: str, folder: Path) -> Path:
    """The interpreter of a peer's environment, which is made first when it is not up to date."""
    requirements = TOOLS / f"requirements-{tool}.txt"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    home, python = folder / tool, folder / tool / "bin" / "python"
    stamp = home / "ready"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"installing {tool} into {folder.name}/{tool} (torch is a large download)", flush=True)
    run(sys.executable, "-m", "venv", "--clear", str(home))
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--requirement", str(requirements))
    marked = [line for line in requirements.read_text().splitlines() if "# no-deps:" in line]
    for line in marked:
        run(*pip, "--no-deps", line.removeprefix("# no-deps:").strip())
    stamp.write_text(wanted)
    return python


def run(*command: str) -> None:
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        raise RuntimeError((finished.stderr.strip().splitlines() or ["no message"])[-1])
