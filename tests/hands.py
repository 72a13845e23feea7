# ruff: noqa: F401
"""What contract tests take of Usher beside its public names: servers to start, words of the protocol that outsiders know, errors by
name.

The only door from `tests/contract.toml` to internals: what moves is mended here, and no contract test is touched.
"""

from __future__ import annotations

from usher.common.base.errors import HandlerUnusable, NotNow, OwnershipLost, RedisTrouble, ReplyUnknown, SettingsError
from usher.common.cli.masters import ask, is_well, living_consumers
from usher.common.http.auth import CSRF_FIELD, CSRF_HEADER
from usher.common.http.credentials import Role, line_of
from usher.common.protocol.attempts import decode as decode_attempts
from usher.common.protocol.keys import MASTER, Keys, LogKeys
from usher.common.protocol.run_log import CRASHED
from usher.common.protocol.stream_id import rank
from usher.common.protocol.ticket_states import is_waiting
from usher.common.readers.loop import LoopOptions
from usher.common.redis.acl import USERS
from usher.common.redis.client import CommandRefused
from usher.common.redis.client import Link as ClientLink
from usher.common.redis.embedded import EmbeddedRedis, find_redis_server, free_port, server_of
from usher.common.redis.endpoints import near
from usher.common.redis.replies import group_of, pairs
from usher.deploy.bench.rig import BenchFailed
from usher.deploy.demo.handlers import Execution
from usher.deploy.demo.handlers import executions as read_executions
from usher.deploy.local.up import LocalSettings, environment
from usher.master.insight.formatting import ticket_url, visible
