"""Run ``usher`` of this very checkout, from whatever folder: ``python /path/to/common/launch.py consumer ...``.

``python -m consumer`` would put the current folder first on the path, where a handler's project may have a ``common`` of its own, and
an installed ``usher`` script may belong to another checkout. This puts Usher's own packages first. ``usher up`` starts programs so.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # was the folder of this file
    from common.cli import main as usher  # only now is the path right

    usher()


if __name__ == "__main__":
    main()
