"""The system with single rules taken out: the tests must notice.

::

    edits.py      how a rule is taken out: one piece of a Lua step or of a function is replaced, for one test or one child process
    catalogue.py  the bugs
    stories.py    the cheapest story that each of them spoils
    on_path/      a sitecustomize module: with its folder on PYTHONPATH, a child process runs the mutant that USHERS_MUTANT names

Nothing of this is in the shipped code, and nothing in the shipped code knows of it.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.chaos.mutants.stories")
