"""Settings of the consumer."""

from __future__ import annotations

import re
import socket
from typing import Annotated

from pydantic import BeforeValidator, Field

from usher.common.base.errors import StartRefused
from usher.common.http.credentials import reach_problems
from usher.common.redis.locate import resolve_redis_url
from usher.common.runtime.settings import Address, CommonSettings, ConsumerName, HttpUrl, HttpUrls, is_loopback

_ODD = re.compile(r"[^A-Za-z0-9._-]")
_NAMED = BeforeValidator(lambda value: value or _ODD.sub("-", socket.gethostname()).lstrip("._-")[:64] or "consumer")


class WorkSettings(CommonSettings):
    """The settings of whatever runs a handler."""

    consumer_name: Annotated[ConsumerName, _NAMED] = Field(
        "",
        validate_default=True,
        description="This consumer's name, its own; it keeps it over restarts. Empty: the name of the host.",
    )
    handler: str = Field("", description="The function that handles messages, as module:function.")
    bind: Address = Field("127.0.0.1:0", description="Where the health endpoint listens.")
    advertise_url: HttpUrl = Field(
        "", description="URL under which masters reach this consumer. Empty: made from USHER_BIND."
    )
    hosts: str = Field(
        "",
        description=(
            "Host names that requests may name, comma separated, beside addresses and the names in USHER_BIND and"
            " USHER_ADVERTISE_URL."
        ),
    )
    concurrency: int = Field(8, ge=1, le=1024, description="Handlers that may run at the same time.")
    capacity: int = Field(
        2000, ge=1, le=100_000, description="Most messages handed over to this consumer and not yet acknowledged."
    )
    capacity_bytes: int = Field(
        256 * 1024 * 1024,
        ge=1,
        description=(
            "Bytes of messages that this process holds; the others that were handed over to it are read as these end."
            " Beyond it one at a time is read while a handler is idle, so that tickets that wait for a retry hold up no"
            " others."
        ),
    )
    ack_mode: str = Field(
        "pipelined",
        pattern=r"^(pipelined|strict)$",
        description=(
            "pipelined: a ticket's next message starts when the handler returned. strict: when Redis has its"
            " acknowledgement."
        ),
    )
    handler_seconds: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="Longest a handler may run; its process is ended then. 0: no limit."
    )
    max_attempts: int = Field(
        8, ge=1, le=1000, description="Starts of a handler for one message before it becomes a dead letter."
    )
    dead_letter_policy: str = Field(
        "skip",
        pattern=r"^(skip|halt)$",
        description="After a dead letter its ticket goes on (skip) or waits for `usher dead` (halt).",
    )
    retry_seconds: float = Field(
        1.0, ge=0, le=3600, description="Wait before the second attempt; doubles with each further one, up to 60 s."
    )
    drain_seconds: float = Field(20.0, ge=0, le=3600, description="At a stop: time for running handlers to finish.")
    run_log_length: int = Field(
        10_000,
        ge=0,
        le=10_000_000,
        description=(
            "Batches kept in the run log; one of more than 8 KiB (about a hundred messages) counts as several. 0 turns"
            " it off."
        ),
    )

    @property
    def contradictions(self) -> list[str]:
        found = super().contradictions
        if not self.handler:
            found.append("USHER_HANDLER is not set (or give --handler)")
        found += reach_problems(self.bind, self.api_token, self.tokens_file)
        if is_loopback(self.bind):
            return found
        if not self.advertise_url:
            found.append(
                "USHER_ADVERTISE_URL: set the URL under which masters reach this consumer, since USHER_BIND is not on"
                " loopback"
            )
        try:  # on loopback there may be no Redis yet: `usher up` looks at the settings before it starts one
            resolve_redis_url(self)
        except StartRefused as missing:
            found.append(str(missing))
        return found


class ConsumerSettings(WorkSettings):
    master_urls: HttpUrls = Field(
        "http://127.0.0.1:8700", description="Masters to register with and report to, comma separated."
    )
