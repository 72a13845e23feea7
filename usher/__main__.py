"""``python -m usher``: the ``usher`` command. Also by path (``python /path/to/usher/__main__.py``), as Usher starts
itself.

By path this very Usher runs, whatever else is installed and whichever folder is current, and the import path stays the
user's: nothing of ours is added to it, so that a project may have packages named ``common`` or ``consumer``.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def _load_by_path(folder: Path) -> None:
    """Make the package in ``folder`` importable as ``usher``, and take ``folder``, which Python has put first, off the
    import path."""
    sys.path.pop(0)
    spec = importlib.util.spec_from_file_location(
        "usher", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    package = sys.modules["usher"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


if __name__ == "__main__":
    if not __package__:
        _load_by_path(Path(__file__).resolve().parent)
    from usher.cli import main  # only now is there a package of that name

    main()
