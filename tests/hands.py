"""What contract tests take of Usher beside its public names: servers to start, words of the protocol that outsiders know, errors by
name.

The only door from `tests/contract.toml` to internals: what moves is mended here, and no contract test is touched.
"""

from __future__ import annotations

from usher.common.base.errors import HandlerUnusable as HandlerUnusable
from usher.common.base.errors import NotNow as NotNow
from usher.common.base.errors import OwnershipLost as OwnershipLost
from usher.common.base.errors import RedisTrouble as RedisTrouble
from usher.common.base.errors import ReplyUnknown as ReplyUnknown
from usher.common.base.errors import SettingsError as SettingsError
from usher.common.cli.masters import ask as ask
from usher.common.cli.masters import is_well as is_well
from usher.common.cli.masters import living_consumers as living_consumers
from usher.common.http.auth import CSRF_FIELD as CSRF_FIELD
from usher.common.http.auth import CSRF_HEADER as CSRF_HEADER
from usher.common.http.credentials import Role as Role
from usher.common.http.credentials import line_of as line_of
from usher.common.protocol.attempts import decode as decode_attempts  # noqa: F401
from usher.common.protocol.keys import MASTER as MASTER
from usher.common.protocol.keys import Keys as Keys
from usher.common.protocol.keys import LogKeys as LogKeys
from usher.common.protocol.owner_words import is_waiting as is_waiting
from usher.common.protocol.run_log import CRASHED as CRASHED
from usher.common.protocol.stream_id import rank as rank
from usher.common.readers.loop import LoopOptions as LoopOptions
from usher.common.redis.acl import USERS as USERS
from usher.common.redis.client import ClientLink as ClientLink
from usher.common.redis.client import CommandRefused as CommandRefused
from usher.common.redis.embedded import EmbeddedRedis as EmbeddedRedis
from usher.common.redis.embedded import find_redis_server as find_redis_server
from usher.common.redis.embedded import free_port as free_port
from usher.common.redis.embedded import server_of as server_of
from usher.common.redis.endpoints import near as near
from usher.common.redis.replies import group_of as group_of
from usher.common.redis.replies import pairs as pairs
from usher.deploy.bench.rig import BenchFailed as BenchFailed
from usher.deploy.demo.handlers import Execution as Execution
from usher.deploy.demo.handlers import RecordReader as RecordReader
from usher.deploy.local.plan import quiet_port as quiet_port
from usher.deploy.local.supervision import environment as environment
from usher.master.insight.formatting import ticket_url as ticket_url
from usher.master.insight.formatting import visible as visible
