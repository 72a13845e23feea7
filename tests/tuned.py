"""``usher`` with other constants than those that the product has, for tests that cannot wait for as long:
``python tests/tuned.py master``, in the environment that ``tuned(SWEEP_S=0.4)`` makes.

A constant is set only where a program of this kind has its module anyway.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

VARIABLE = "TUNED"
TUNED = [sys.executable, str(Path(__file__))]
#: Kind of program -> the modules of its constants; those that others take constants from come first.
_MODULES = {
    "master": {
        "usher.master.leader.limits": ("BATCH", "TICKET_WINDOW", "READ_AHEAD", "RECONCILE_S", "SWEEP_S"),
        "usher.master.operations.trimming": ("TRIM_S",),
        "usher.master.assembly.program": ("HEALTH_S",),
    },
    "audit": {"usher.master.audit.findings": ("SETTLE_S",)},
    "consumer": {"usher.consumer.incarnation": ("FLUSH_S", "RETRY_CAP_S")},
}


def tuned(**constants: Any) -> dict[str, str]:
    """The environment of a program that TUNED starts."""
    known = {name for modules in _MODULES.values() for names in modules.values() for name in names}
    assert constants.keys() <= known, constants.keys() - known
    return {VARIABLE: json.dumps(constants)}


if __name__ == "__main__":
    sys.path.pop(0)  # of this file's folder
    given = json.loads(os.environ.get(VARIABLE, "{}"))
    for module, names in _MODULES.get(sys.argv[1], {}).items():
        if names := [name for name in names if name in given]:
            place = importlib.import_module(module)
            for name in names:
                assert hasattr(place, name), name
                setattr(place, name, given[name])
    importlib.import_module("usher.cli").main()
