"""Usher: every ticket's messages in order, one at a time; different tickets at the same time; on the Redis that you
have.

Your programs import from here, and only from here::

    from usher import handler, batch, Message, GiveUp, RetryLater, PartialFailure   # handlers
    from usher import running                                                      # them, within your program
    from usher import Producer, Link                                               # send
    from usher import SqlSink, AsyncSqlSink, RedisGuard                            # effects that happen exactly once
    from usher import write_to_outbox, LogConsumer                                 # transactional outbox
    from usher import MessageReadingLoop, ReliableStream, StreamRouter             # streams without tickets

A name is imported when it is first used: ``import usher`` alone loads nothing else. ``docs/api.md`` lists them all.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

#: Modules, and the public names that each defines.
_DEFINED = {
    "usher.common.base.errors": "Behind CallTimeout Failed GiveUp Invalid PartialFailure RetryLater UsherError",
    "usher.common.cli.send": "redis_url",
    "usher.common.outbox.log_consumer": "LogConsumer LogLost Record",
    "usher.common.outbox.store": "LogRecord write_all_to_outbox write_to_outbox",
    "usher.common.protocol.message": "EntryView",
    "usher.common.readers.loop": "LoopOptions MessageReadingLoop ReliableStream StreamMessage reader_name",
    "usher.common.redis.client": "Link",
    "usher.common.router.router": "NOW RouterOptions StreamRouter Subscription SubscriptionEnded",
    "usher.common.runtime.signals": "UntilSignal",
    "usher.common.sending.producer": "AsyncProducer Outgoing Producer Sent",
    "usher.consumer.handlers.decorators": "around batch handler",
    "usher.consumer.handlers.message": "Message",
    "usher.consumer.handlers.typed": "Router",
    "usher.consumer.sinks.outcomes": "Duplicate SinkNotNow StaleFence",
    "usher.consumer.sinks.redis_guard": "RedisGuard",
    "usher.consumer.sinks.sql": "SqlSink",
    "usher.consumer.sinks.sql_async": "AsyncSqlSink",
    "usher.deploy.local.run": "running",
}
_HOMES = {name: module for module, names in _DEFINED.items() for name in names.split()}

if TYPE_CHECKING:
    __version__: str
    from usher.common.base.errors import Behind as Behind
    from usher.common.base.errors import CallTimeout as CallTimeout
    from usher.common.base.errors import Failed as Failed
    from usher.common.base.errors import GiveUp as GiveUp
    from usher.common.base.errors import Invalid as Invalid
    from usher.common.base.errors import PartialFailure as PartialFailure
    from usher.common.base.errors import RetryLater as RetryLater
    from usher.common.base.errors import UsherError as UsherError
    from usher.common.cli.send import redis_url as redis_url
    from usher.common.outbox.log_consumer import LogConsumer as LogConsumer
    from usher.common.outbox.log_consumer import LogLost as LogLost
    from usher.common.outbox.log_consumer import Record as Record
    from usher.common.outbox.store import LogRecord as LogRecord
    from usher.common.outbox.store import write_all_to_outbox as write_all_to_outbox
    from usher.common.outbox.store import write_to_outbox as write_to_outbox
    from usher.common.protocol.message import EntryView as EntryView
    from usher.common.readers.loop import LoopOptions as LoopOptions
    from usher.common.readers.loop import MessageReadingLoop as MessageReadingLoop
    from usher.common.readers.loop import ReliableStream as ReliableStream
    from usher.common.readers.loop import StreamMessage as StreamMessage
    from usher.common.readers.loop import reader_name as reader_name
    from usher.common.redis.client import Link as Link
    from usher.common.router.router import NOW as NOW
    from usher.common.router.router import RouterOptions as RouterOptions
    from usher.common.router.router import StreamRouter as StreamRouter
    from usher.common.router.router import Subscription as Subscription
    from usher.common.router.router import SubscriptionEnded as SubscriptionEnded
    from usher.common.runtime.signals import UntilSignal as UntilSignal
    from usher.common.sending.producer import AsyncProducer as AsyncProducer
    from usher.common.sending.producer import Outgoing as Outgoing
    from usher.common.sending.producer import Producer as Producer
    from usher.common.sending.producer import Sent as Sent
    from usher.consumer.handlers.decorators import around as around
    from usher.consumer.handlers.decorators import batch as batch
    from usher.consumer.handlers.decorators import handler as handler
    from usher.consumer.handlers.message import Message as Message
    from usher.consumer.handlers.typed import Router as Router
    from usher.consumer.sinks.outcomes import Duplicate as Duplicate
    from usher.consumer.sinks.outcomes import SinkNotNow as SinkNotNow
    from usher.consumer.sinks.outcomes import StaleFence as StaleFence
    from usher.consumer.sinks.redis_guard import RedisGuard as RedisGuard
    from usher.consumer.sinks.sql import SqlSink as SqlSink
    from usher.consumer.sinks.sql_async import AsyncSqlSink as AsyncSqlSink
    from usher.deploy.local.run import running as running

__all__ = [*sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use (PEP 562)."""
    if name == "__version__":
        return importlib.import_module("usher.common.base.extras").version()
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'usher' has no attribute {name!r}; its public names: {', '.join(__all__)}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
