"""The SQL sink for ``async def`` handlers, on an AsyncEngine (needs ``pip install 'SQLAlchemy[asyncio]'`` and an async
driver; psycopg is one): ``AsyncSqlSink(create_async_engine(...))``, and ``async def handle(message, session)``. All of
``usher.consumer.sinks.sql`` holds here too: the statements are the same.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.util import greenlet_spawn

from usher.common.base.callables import check_done
from usher.consumer.sinks.outcomes import Marked, SinkMisused
from usher.consumer.sinks.sql import ONE_MESSAGE, WAIT, WEEK_S, SinkSteps

M = TypeVar("M", bound=Marked)


class AsyncSqlSink:
    """Exactly-once effects like SqlSink's, for one event loop, since an engine's connections belong to a loop."""

    def __init__(self, engine: AsyncEngine, name: str = "default", *, keep_s: float = WEEK_S) -> None:
        if not isinstance(engine, AsyncEngine):
            raise SinkMisused(
                "AsyncSqlSink takes what create_async_engine makes; for an Engine or a URL there is"
                " usher.consumer.sinks.sql.SqlSink"
            )
        self.engine, self._steps = engine, SinkSteps(engine.sync_engine, name, keep_s)
        self.ddl = self._steps.ddl

    async def create_tables(self) -> None:
        """Create the sink's tables where they are missing; safe in many processes at once."""
        await greenlet_spawn(self._steps.create_tables)

    def exactly_once(self, handle: Callable[[M, AsyncSession], Awaitable[Any]]) -> Callable[[M], Awaitable[None]]:
        """Make ``async def handle(message, session)`` a handler of one argument, never called for a repeat. A
        decorator; raises SinkMisused for a plain function."""
        if not inspect.iscoroutinefunction(handle):
            raise SinkMisused("this handler is not `async def`: use usher.consumer.sinks.sql.SqlSink")

        @functools.wraps(handle)
        async def handle_once(message: M) -> None:
            async with self.transaction(message) as session:
                if session is not None:
                    check_done(await handle(message, session), SinkMisused, WAIT)

        handle_once.__signature__ = ONE_MESSAGE  # type: ignore[attr-defined]
        return handle_once

    @contextlib.asynccontextmanager
    async def transaction(self, message: Marked) -> AsyncIterator[AsyncSession | None]:
        """Give a session in the transaction that also holds fence and uid, or None for a repeat: check for it. Raises
        StaleFence, SinkNotNow and SinkMisused."""
        admitted = self._steps.admitted(message)
        session = await greenlet_spawn(admitted.__enter__)
        try:
            made: Any = lambda **_: session  # noqa: E731 - the one that the statements of the sink have opened
            yield None if session is None else AsyncSession(sync_session_class=made)
        except BaseException as problem:
            if not await greenlet_spawn(admitted.__exit__, type(problem), problem, problem.__traceback__):
                raise
        else:
            await greenlet_spawn(admitted.__exit__, None, None, None)
