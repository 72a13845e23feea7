"""Run ``usher audit`` as ``python -m usher.master.audit``, or under ``spark-submit``."""

from __future__ import annotations

import sys

from usher.cli import run


def main() -> None:
    """Run the command with this program's arguments."""
    sys.exit(run(["audit", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
