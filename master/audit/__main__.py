"""Run ``usher audit`` as ``python -m usher.master.audit``, or under ``spark-submit``."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from usher.cli import run
    except ImportError as missing:  # Python would end with 1, which says that the audit found something
        sys.stderr.write(f"usher: {missing}: give Usher along (--py-files), and install what it needs\n")
        sys.exit(2)
    sys.exit(run(["audit", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
