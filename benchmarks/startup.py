"""Seconds for `import bert4rec` and `bert4rec --help`, best of seven, beside a bare interpreter."""

import subprocess
import sys
import time

PROGRAMS = {
    "python -c pass": "pass",
    "import bert4rec": "import bert4rec",
    "bert4rec --help": "import sys; sys.argv = ['bert4rec', '--help']\nfrom bert4rec.cli import main; main()",
}


def seconds(program: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


for name, program in PROGRAMS.items():
    print(f"{name:<16} {min(seconds(program) for _ in range(7)):.3f} s")
