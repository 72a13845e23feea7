"""A logging call in a handler against the same call in plain Python: where that does not raise, ours does not."""

from __future__ import annotations

import logging
import os
import select
import sys
from pathlib import Path
from typing import Any, TextIO

import hypothesis
from hypothesis import strategies as st

from usher.common.base import log as ours
from usher.common.base.log import LogHandler


class Hostile:
    """An object that has no text, for any reason."""

    def __init__(self, raises: type[BaseException]) -> None:
        self.raises = raises

    def __repr__(self) -> str:
        raise self.raises("no text")

    __str__ = __format__ = __repr__  # type: ignore[assignment]


class HostileError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class HostileKey(str):
    __slots__ = ()

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        return self[:]

    def __format__(self, how: str) -> str:
        raise RuntimeError("no text")


def circular() -> dict[Any, Any]:
    document: dict[Any, Any] = {}
    document["itself"] = [document]
    return document


def deep() -> list[Any]:
    made: list[Any] = []
    for _ in range(50_000):
        made = [made]
    return made


_SCALARS = st.one_of(
    st.none(),
    st.integers(),
    st.floats(),
    st.text(),
    st.text(st.characters(categories=["Cs"]), min_size=1),
    st.binary(),
    st.builds(object),
    st.sampled_from([RuntimeError, KeyError, RecursionError, MemoryError]).map(Hostile),
    st.builds(HostileError),
    st.builds(HostileKey, st.text()),
    st.builds(circular),
    st.builds(deep),
)
_VALUES = st.one_of(
    _SCALARS,
    st.lists(_SCALARS, max_size=3),
    st.dictionaries(st.one_of(st.text(), st.integers(), st.binary(), st.tuples(st.integers())), _SCALARS, max_size=3),
)
_MESSAGES = st.one_of(
    st.sampled_from(["%d apples", "%s", "%(a)s", "100%", "%s %s", "%", "%c", "{}", "plain", "a\nb", "\ud800", ""]),
    _SCALARS,
)
_EXTRA = st.one_of(
    st.none(),
    st.dictionaries(
        st.sampled_from(
            ["facts", "left_out", "message", "msg", "threadName", "usher_written", "created", "x", "exc_text"]
        ),
        _VALUES,
        max_size=3,
    ),
    st.fixed_dictionaries({"facts": st.dictionaries(st.text(), _VALUES, max_size=3)}),
)
_EXC_INFO = st.one_of(
    st.sampled_from([None, True, False, 5, (1, 2, 3), (None, None, None), "text"]), st.builds(HostileError)
)


class _StderrTo:
    """stderr as a file of the test's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before, sys.stderr = sys.stderr, self._stream

    def __exit__(self, *_: object) -> None:
        sys.stderr = self._before


def _raised(logger: logging.Logger, args: tuple[Any, ...], more: dict[str, Any]) -> BaseException | None:
    try:
        try:
            raise HostileError
        except HostileError:
            logger.log(*args, **more)
    except BaseException as problem:
        return problem
    return None


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(
    level=st.sampled_from([logging.INFO, logging.WARNING, 35, "high", 10**30, True]),
    message=_MESSAGES,
    args=st.lists(_VALUES, max_size=2),
    extra=_EXTRA,
    exc_info=_EXC_INFO,
    stack_info=st.booleans(),
    style=st.sampled_from(["human", "json"]),
    is_quiet=st.booleans(),
)
def test_what_does_not_raise_in_plain_python_does_not_raise_here_and_is_told(
    level: Any, message: Any, args: list[Any], extra: Any, exc_info: Any, stack_info: bool, style: str, is_quiet: bool
) -> None:
    call = (level, message, *args)
    more = {"extra": extra, "exc_info": exc_info, "stack_info": stack_info}
    reader, writer = os.pipe()
    logging.logThreads = not is_quiet
    try:
        with Path(os.devnull).open("w") as nowhere, _StderrTo(nowhere):
            plain = logging.Logger("plain")
            plain.addHandler(logging.StreamHandler(nowhere))
            expected = _raised(plain, call, more)
            with os.fdopen(os.dup(writer), "w") as stderr, _StderrTo(stderr):
                handler = LogHandler("c1", logging.INFO, style)
            tested = logging.Logger("tested")
            tested.addHandler(handler)
            ours._ours = handler
            found = _raised(tested, call, more)
            assert found is None or expected is not None, f"{found!r}, in plain Python {expected!r}"
            if found is None:
                assert select.select([reader], [], [], 0)[0], "nothing was written"
    finally:
        logging.logThreads = True
        ours._ours = None
        os.close(handler.stderr._descriptor)
        os.close(reader)
        os.close(writer)
