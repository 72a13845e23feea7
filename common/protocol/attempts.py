"""A message's attempts, noted in ``...:attempts``: a field per stream id, ``starts failures crashes losses``. Pure.

Only trouble is noted: a message without a field has never failed. lua/includes/attempts.lua reads and writes the same
format.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from usher.common.base.text import pluralize

_NOTED = re.compile(rb"([0-9]{1,9})(?: ([0-9]{1,9}) ([0-9]{1,9}) ([0-9]{1,9}))?")

#: First words of the errors of messages whose last start was never seen to end: nothing was raised, so these words tell
#: them apart.
ENDED = "an operator ended its run"
CUT_OFF, RAN_PAST = (
    "its process ended while its handler ran",
    "it ran past its deadline (deadline_s, or USHER_HANDLER_SECONDS)",
)


#: So many failures use up every number of attempts: an operator has given the message up (lua/operations/order.lua).
#: Consumers of any version make a dead letter of it in its turn.
GIVEN_UP = 900_000_000
#: The same, of what waited when somebody cleared its ticket.
CLEARED = GIVEN_UP + 1


class Attempts(NamedTuple):
    """The counts of one message. ``starts``: known starts of its handler. ``failures``: starts that are charged against
    max_attempts. ``crashes``: unexplained ends of the process while it ran; 0: it is no suspect. ``losses``: silent
    ends of its owner while it was the next of its ticket (it may have run, or not), or ends from outside while it ran.
    """

    starts: int = 0
    failures: int = 0
    crashes: int = 0
    losses: int = 0

    @property
    def failed(self) -> int:
        """Return how many starts ended badly. The first crash is never charged; of more of them as many are as there
        are failures, since a start that is charged leaves two crashes at least."""
        return self.failures + self.crashes if self.crashes < 2 else max(self.failures, self.crashes)

    def blamed(self) -> Attempts:
        """Charge the last start, and every crash of former ones that is not charged yet. Starts that asked to be called
        later stay free.

        >>> Attempts(starts=3, failures=0, crashes=2).blamed()
        Attempts(starts=3, failures=3, crashes=2, losses=0)
        >>> Attempts(starts=9, failures=1, crashes=0).blamed().failures
        2
        >>> Attempts(starts=9, failures=2, crashes=1).blamed().failures, Attempts(9, 4, 2).blamed().failures
        (4, 5)
        """
        return self._replace(failures=max(self.failures, min(self.starts, self.failed + 1)))

    @property
    def is_given_up(self) -> bool:
        return self.failures >= GIVEN_UP

    @property
    def put_off(self) -> bool:
        """True if the message was started and never failed: it only asked to be called later.

        >>> Attempts(3).put_off, Attempts(3, 1).put_off, NEVER.put_off
        (True, False, False)
        """
        return self.starts > 0 and not (self.failures or self.crashes or self.losses)


NEVER = Attempts()


def attempts_told(starts: int, charged: int, most: int = 0) -> str:
    """Return attempts for people: those that are charged, of ``most`` (0: not known here), and all starts where these
    are more.

    >>> attempts_told(3, 3, 8), attempts_told(5, 3, 8), attempts_told(1, 0), attempts_told(5, GIVEN_UP, 3)
    ('3 of 8', '3 of 8 (5 starts)', '0 (1 start)', 'given up by an operator (5 starts)')
    """
    told = "given up by an operator" if charged >= GIVEN_UP else f"{charged:,} of {most:,}" if most else f"{charged:,}"
    return told if starts == charged else f"{told} ({pluralize(starts, 'start')})"


def encode(attempts: Attempts) -> bytes:
    return b"%d %d %d %d" % attempts


def decode(value: bytes) -> Attempts:
    """Parse a field's value. A plain number, as plain readers write it (common/readers), means that many starts, all
    failed. One that is unreadable is ``NEVER``: it must not stop its message, and who reads it says so in the log.

    >>> decode(b"2 1 1 0"), decode(b"3")
    (Attempts(starts=2, failures=1, crashes=1, losses=0), Attempts(starts=3, failures=3, crashes=0, losses=0))
    """
    if (found := _NOTED.fullmatch(value)) is None:
        return NEVER
    starts, *others = (int(number or 0) for number in found.groups())
    return Attempts(starts, *others) if found[2] else Attempts(starts, starts)
