"""Report dead letters: always as a metric, and to a webhook if USHER_DEAD_LETTER_WEBHOOK names one.

The log event is written where the decision is made (``message_given_up``, ``messages_rejected``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from usher.common.observability.metrics import Metrics
from usher.common.protocol.keys import Keys
from usher.common.runtime.service import Service
from usher.common.runtime.settings import CommonSettings

if TYPE_CHECKING:
    from usher.common.observability.webhook import Webhook


class DeadLetterNotifier:
    """A notifier that any thread may call; it never blocks. It sends no fields or texts of a message: they may be
    secrets."""

    def __init__(self, metrics: Metrics, settings: CommonSettings, program: str, keys: Keys) -> None:
        self._counter = metrics.dead_letters
        self._webhook: Webhook | None = None
        if settings.dead_letter_webhook:
            # Imported here, because few programs have a webhook, and requests costs each 4 MiB.
            from usher.common.observability.webhook import Webhook

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
        """Count and send a message that was given up."""
        self._counter.labels(reason).inc()
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
