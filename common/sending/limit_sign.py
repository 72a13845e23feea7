"""The sign of masters that too much waits (USHER_BACKLOG_LIMIT): read along with what is sent, asked for only while it
is up."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from usher.common.base.clock import now_s
from usher.common.base.errors import Behind, NotNow, ReplyUnknown
from usher.common.protocol.keys import LogKeys
from usher.common.redis.client import Link
from usher.common.redis.replies import pairs

#: Seconds until a sign that was up is looked at again.
_AGAIN_S = 0.5


class LimitSign:
    """The sign of ``stream``, as the last look at it told."""

    def __init__(self, link: Link, stream: str) -> None:
        self._link = link
        self.key = LogKeys(stream).behind
        self.command = ("HGETALL", self.key)
        self._stream = stream
        self._behind: dict[bytes, int] = {}  # by tenant; b"": the stream
        self._asked_s = -math.inf

    def learn(self, reply: Any) -> None:
        """Take in a reply of ``command``. Raises what it is, when it is an error."""
        if isinstance(reply, Exception):
            raise reply
        self._behind = {}
        for name, number in pairs(reply).items():
            tenant = name.partition(b"/")[2]
            self._behind[tenant] = max(int(number), self._behind.get(tenant, 0))
        self._asked_s = now_s()

    def check(self, tenants: Iterable[bytes]) -> None:
        """Raise Behind when too much waits for one of these. Asks Redis the first time, and while the sign is up."""
        if self._asked_s == -math.inf or (self._behind and now_s() - self._asked_s > _AGAIN_S):
            try:
                self.learn(self._link.call(*self.command))
            except ReplyUnknown as lost:  # a look: nothing was sent
                raise NotNow("CONNECT", str(lost)) from lost
        for tenant in (b"", *tenants):
            if tenant in self._behind:
                raise Behind(self._stream, tenant.decode(errors="replace"), self._behind[tenant])
