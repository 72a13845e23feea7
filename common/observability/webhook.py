"""Report dead letters: always as a metric, and to a webhook if USHER_DEAD_LETTER_WEBHOOK names one, in batches and at
limited rate. It never holds up the flow: letters that cannot be sent are counted and dropped.

The log event is written where the decision is made (``message_given_up``, ``messages_rejected``).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from usher.common.base.log import event
from usher.common.observability.metrics import Metrics
from usher.common.protocol.keys import Keys
from usher.common.runtime.service import Service
from usher.common.runtime.settings import CommonSettings

log = logging.getLogger(__name__)

#: Most dead letters of one POST, and most that may wait for a POST; more are only counted (``left_out``).
MOST_AT_ONCE = 100
MOST_WAITING = 1000
_TIMEOUT_S = (1.0, 3.0)
#: Tries per batch; the pause doubles after each failure.
_TRIES = 4


def redact_webhook_url(url: str) -> str:
    """Return the part of a URL that may be shown: path, query and user may be secrets.

    >>> redact_webhook_url("https://u:p@hooks.example:8443/T0/B0/token?key=1")
    'https://hooks.example:8443/...'
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return "(no URL)"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/..."


def signature(secret: str, message_id: str, timestamp_s: int, body: bytes) -> str:
    """Return the signature of a message as Standard Webhooks (standardwebhooks.com) has it in ``webhook-signature``.
    ``secret``: ``whsec_`` and base64, or any text.

    >>> secret, message_id = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek"
    >>> signature(secret, message_id, 1614265330, b'{"test": 2432232314}')
    'v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE='
    """
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True) if secret.startswith("whsec_") else b""
    except binascii.Error:
        key = b""
    signed = f"{message_id}.{timestamp_s}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key or secret.encode(), signed, hashlib.sha256)).decode()


class Webhook(Service):
    """A service that POSTs ``{"program", "stream", "group", "dead_letters": [...], "left_out": n}`` to one URL: the
    first at once, then one per ``pause_s``. With a secret it signs them (Standard Webhooks): ``webhook-id``, the same
    one for each try, ``webhook-timestamp`` and ``webhook-signature``.

    ``add`` may be called from any thread and never blocks. Answers other than 2xx, redirects included, are failures:
    retried a few times, then dropped; the letters themselves are in Redis.
    """

    name = "bell"
    stalls_after_s = 60.0  # longer than the longest pause

    def __init__(
        self, url: str, about: Mapping[str, str], pause_s: float = 5.0, secret: str = "", ca: Path | None = None
    ) -> None:
        """Make the service. ``ca``: a file of the trusted CAs; None: those of the system."""
        super().__init__()
        self._secret = secret
        self._url = url
        self._about = dict(about)
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._waiting: deque[dict[str, Any]] = deque()  # guarded by self._lock, as is the next
        self._left_out = 0
        import requests  # here, because few programs have a webhook, and it costs each 4 MiB

        self._session = requests.Session()
        self._session.verify = True if ca is None else str(ca.expanduser())
        self._session.trust_env = False  # take no proxies and no .netrc from the environment
        self.sent = 0
        self.dropped = 0

    def add(self, letter: dict[str, Any]) -> None:
        with self._lock:
            if len(self._waiting) < MOST_WAITING:
                self._waiting.append(letter)
            else:
                self._left_out += 1
        self.wake()

    def run_once(self) -> float:
        with self._lock:
            batch = [self._waiting.popleft() for _ in range(min(MOST_AT_ONCE, len(self._waiting)))]
            left_out, self._left_out = (self._left_out, 0) if batch else (0, self._left_out)
        if not batch:
            return self.stalls_after_s / 3
        body = orjson.dumps({**self._about, "dead_letters": batch, "left_out": left_out})
        message_id = f"msg_{secrets.token_urlsafe(18)}"
        for number in range(_TRIES):
            trouble = self._post(message_id, body)
            if trouble is None or self.stopping:
                break
            self._stop.wait(self._pause_s * 2**number)
            self.made_progress()
        if trouble is None:
            self.sent += len(batch)
        else:
            self.dropped += len(batch)
            url = redact_webhook_url(self._url)
            event(log, "webhook_failed", level=logging.WARNING, url=url, letters=len(batch), why=trouble)
        self._stop.wait(self._pause_s)
        return 0.0

    def _post(self, message_id: str, body: bytes) -> str | None:
        headers = {"Content-Type": "application/json"}
        if self._secret:
            at_s = int(time.time())
            headers |= {"webhook-id": message_id, "webhook-timestamp": str(at_s)}
            headers["webhook-signature"] = signature(self._secret, message_id, at_s, body)
        try:
            with self._session.post(
                self._url, data=body, headers=headers, timeout=_TIMEOUT_S, allow_redirects=False, stream=True
            ) as response:
                return None if 200 <= response.status_code < 300 else f"it answered {response.status_code}"
        # ValueError: a URL that urllib3 cannot take. OSError: an error of requests, or a file of CAs is not there.
        except (ValueError, OSError) as problem:
            return type(problem).__name__

    def on_end(self) -> None:
        self._session.close()


class DeadLetterNotifier:
    """A notifier that any thread may call; it never blocks. It sends no fields or texts of a message: they may be
    secrets."""

    def __init__(self, metrics: Metrics, settings: CommonSettings, program: str, keys: Keys) -> None:
        self._count = metrics.count_letter
        self._webhook: Webhook | None = None
        if settings.dead_letter_webhook:
            self._webhook = Webhook(
                settings.dead_letter_webhook,
                {"program": program, "stream": keys.stream, "group": keys.group},
                secret=settings.webhook_secret,
                ca=settings.tls_ca,
            )

    @property
    def services(self) -> Sequence[Service]:
        return () if self._webhook is None else (self._webhook,)

    def ring(
        self,
        ticket: bytes,
        message_id: bytes,
        reason: str,
        error_type: str = "",
        attempts: int = 0,
        policy: str = "skip",
    ) -> None:
        self._count(reason)
        if self._webhook is not None:
            self._webhook.add(
                {
                    "ticket_id": ticket.decode(errors="replace"),
                    "message_id": message_id.decode(errors="replace"),
                    "reason": reason,
                    "error_type": error_type,
                    "attempts": attempts,
                    "policy": policy,
                }
            )
