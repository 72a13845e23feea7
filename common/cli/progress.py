"""A bar of progress: on a terminal only, and gone at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def progress(is_counted: bool = True) -> Iterator[Callable[[str, int, int], object]]:
    """Yield a function that shows a text, how many are done, and of how many; only the text if it is not counted."""
    screen = Console(stderr=True)
    if not screen.is_terminal:
        yield lambda text, done, total: None
        return
    counted = (BarColumn(), MofNCompleteColumn()) if is_counted else ()
    with Progress(
        TextColumn("{task.description}"), *counted, TimeElapsedColumn(), console=screen, transient=True
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda text, done, total: bar.update(task, description=text, completed=done, total=total)
