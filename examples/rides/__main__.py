"""``python -m examples.rides``, in the root of a checkout."""

from __future__ import annotations

from examples.rides.cli import rides

if __name__ == "__main__":
    rides(prog_name="python -m examples.rides")
