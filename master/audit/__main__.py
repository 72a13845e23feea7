"""``python -m usher.master.audit``, and what ``spark-submit`` runs: the same as ``usher audit``."""

from __future__ import annotations

import sys

from usher.cli import run


def main() -> None:
    """The command, with this program's arguments."""
    sys.exit(run(["audit", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
