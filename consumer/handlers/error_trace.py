"""The traceback that a dead letter keeps: the last calls, as text, bounded however deep and long they were."""

from __future__ import annotations

import traceback

#: Most calls kept of each exception of a chain (the innermost ones), and the longest text in characters.
_MOST_CALLS = 30
_LONGEST = 8000
#: Characters of the name of an error's type that are kept.
_LONGEST_NAME = 200


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
