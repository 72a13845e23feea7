"""The traceback that a dead letter keeps: the last calls, as text, bounded however deep and long they were; and the
line of the handler's own code in it."""

from __future__ import annotations

import functools
import re
import site
import sys
import sysconfig
import traceback
from pathlib import Path

import usher.common
import usher.consumer

#: Most calls kept of each exception of a chain (the innermost ones), and the longest text in characters.
_MOST_CALLS = 30
_LONGEST = 8000
#: Characters of the name of an error's type that are kept.
_LONGEST_NAME = 200
#: A call in a traceback, in the stack of a thread, or in a dump of faulthandler.
_CALL = re.compile(r"^[ |+-]*File \"([^\"\n]+)\", line ([0-9]+),? in ", re.MULTILINE)
#: What stands between the tracebacks of an exception and of its cause.
_CAUSED = re.compile(r"^[ |]*(?:The above exception was|During handling of the above)", re.MULTILINE)


def traced(raised: BaseException) -> str:
    """Return the traceback of ``raised`` and of its causes as text: source lines only, no values. A long one keeps its
    end, where the error is."""
    try:
        text = "".join(traceback.format_exception(type(raised), raised, raised.__traceback__, limit=-_MOST_CALLS))
    except BaseException as problem:  # an exception of the handler's own may fail to be formatted
        text = f"(its traceback cannot be had: {type(problem).__name__})"
    kept = text if len(text) <= _LONGEST else "...\n" + text[-_LONGEST:]
    return kept.encode("utf-8", "backslashreplace").decode()


def type_name(raised: BaseException) -> str:
    """Return the name of the type of ``raised``, bounded, and without surrogates, which no letter can take."""
    return type(raised).__name__[:_LONGEST_NAME].encode("utf-8", "backslashreplace").decode()


@functools.lru_cache(64)  # where very many fail alike
def own_line(trace: str) -> str:
    """Return file and line of the innermost call of the handler's own code in a traceback, or in the stack of a thread;
    "" without one. Own is what belongs neither to Usher nor to Python, nor to an installed library, unless the handler
    is installed itself: then it is what lies beside the outermost such call."""
    last = trace[max((found.end() for found in _CAUSED.finditer(trace)), default=0) :]
    calls = [found.groups() for found in _CALL.finditer(last)] or [found.groups() for found in _CALL.finditer(trace)]
    if "(most recent call first)" in trace:  # by faulthandler
        calls.reverse()
    ours, python, installed = _roots()
    calls = [call for call in calls if not call[0].startswith(ours)]
    own = [call for call in calls if not call[0].startswith((*python, *installed))]
    if not own and (handler := next((path for path, _ in calls if path.startswith(installed)), "")):
        root = next(root for root in installed if handler.startswith(root))
        beside = root + handler[len(root) :].partition("/")[0]
        own = [call for call in calls if call[0].startswith(beside)]
    if not own:
        return ""
    path, line = own[-1]
    roots = [f"{one or Path.cwd()}/" for one in sys.path]
    return f"{path[max((len(root) for root in roots if path.startswith(root)), default=0) :]}:{line}"


def is_users(path: str) -> bool:
    """Return whether code is neither of Usher nor of Python, nor installed."""
    ours, python, installed = _roots()
    return not path.startswith((*ours, *python, *installed))


def raised_at(raised: BaseException) -> str:
    """Return the same of an error, without the cost of its traceback as text."""
    calls = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(raised.__traceback__)]
    return own_line("".join(f'File "{path}", line {line}, in \n' for path, line in calls[-_MOST_CALLS:]))


def has_cause(trace: str) -> bool:
    return _CAUSED.search(trace) is not None


@functools.cache
def _roots() -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the folders of Usher, of Python, and of installed libraries, which may hold the one or lie in the
    other."""
    paths = sysconfig.get_paths()
    ours = [str(Path(str(one.__file__)).parent) for one in (usher.common, usher.consumer)]
    python, installed = (
        (paths["stdlib"], paths["platstdlib"]),
        (paths["purelib"], paths["platlib"], *site.getsitepackages()),
    )
    return ("<", *_folders(*ours)), _folders(*python), _folders(*installed)


def _folders(*paths: str) -> tuple[str, ...]:
    return tuple(f"{spelt}/" for path in paths for spelt in {path, str(Path(path).resolve())})
