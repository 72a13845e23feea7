"""``python -m benchmarks NAME``, in the root of a checkout."""

from __future__ import annotations

import sys

from benchmarks.cli.main import benchmarks
from usher.cli import run

if __name__ == "__main__":
    sys.exit(run(group=benchmarks, name="python -m benchmarks"))
