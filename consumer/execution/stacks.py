"""Tell where a handler stands at this moment, as text. It is looked for in all threads, so that a start costs nothing
for it."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from usher.consumer.handlers.message import Message

_HERE = f"{Path(__file__).parent}/"
_HEAD = "Stack (most recent call last):\n"


def thread_stack(message: Message) -> str:
    """Return the calls of the thread that runs the handler of ``message``, from the handler on; "" if none does."""
    for top in list(sys._current_frames().values()):
        frames = [top, *_callers(top)]
        ours = next((at for at, frame in enumerate(frames) if _runs(frame, message)), 0)
        if ours:
            return _told(frames[ours - 1 :: -1])
    return ""


def task_stack(task: asyncio.Task[Any]) -> str:
    """Return the calls of a task that waits: those of the coroutines that it awaits, one within the other."""
    frames: list[FrameType] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None and not frame.f_code.co_filename.startswith(_HERE):
            frames.append(frame)
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return _told(frames)


def _callers(frame: FrameType) -> Iterator[FrameType]:
    while (caller := frame.f_back) is not None:
        yield caller
        frame = caller


def _runs(frame: FrameType, message: Message) -> bool:
    """Return whether the frame is the one of a runner of ours that has called a handler with ``message``."""
    if not frame.f_code.co_filename.startswith(_HERE):
        return False
    held = frame.f_locals
    return held.get("message") is message or message in getattr(held.get("call"), "messages", ())


def _told(frames: list[FrameType]) -> str:
    """Return the frames as text, the outermost first."""
    if not frames:
        return ""
    walked = ((frame, frame.f_lineno) for frame in frames)
    return _HEAD + "".join(traceback.StackSummary.extract(walked).format())
