"""``python -m tests.chaos.checker HISTORY``: judge a history again. Exit code 1 when something was broken."""

from __future__ import annotations

import sys
from pathlib import Path

from .history import History
from .verdict import judge


def main(path: str) -> int:
    verdict = judge(History.read(Path(path).read_text("utf-8", "surrogateescape")))
    sys.stdout.write(f"{verdict.figures}\n{verdict.told()}\n{len(verdict.violations)} violations\n")
    return 0 if verdict.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
