"""``python -m examples.rides``, in the root of a checkout."""

from __future__ import annotations

import sys

from examples.rides.cli import rides
from usher.cli import run

if __name__ == "__main__":
    sys.exit(run(group=rides, name="python -m examples.rides"))
