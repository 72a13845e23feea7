"""Python imports this module at its start when this folder is on PYTHONPATH: the process then runs the mutant that
USHERS_MUTANT names.

Only the chaos tests put the folder there. That the mutant is on is said on stderr, so that a run without it does not
count.
"""

from __future__ import annotations

import os
import sys


def _become(name: str) -> None:
    from tests.chaos.mutants.catalogue import BUGS

    [mutant] = [bug.mutant for bug in BUGS if bug.mutant.name == name]
    mutant.apply(setattr)
    sys.stderr.write(f"this process runs the mutant {name!r}\n")


if "USHERS_MUTANT" in os.environ:
    _become(os.environ["USHERS_MUTANT"])
