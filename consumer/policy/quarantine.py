"""Quarantine: which messages run in a process of their own, and what to note when a process has ended. Pure.

An end of the consumer's own process proves nothing against any message that ran in it: each may have returned a moment
before, and another one, or somebody outside, may have ended it. So it is charged to none; all of them are suspects from
then on, and a suspect runs in a child process (consumer/isolation), one message at a time. The consumer sees how the
child ends, so neighbours leave quarantine by surviving, and the killer by using up its attempts.

An end that came from outside (SIGKILL, while the kernel ended nothing for want of memory) is most probably none of
their doing: it makes suspects only of those to whom it happens three times in a row, as the loss of an owner does that
leaves no journal. The child takes a moment to start, and all others go on where they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from usher.common.protocol.attempts import Attempts

#: Losses (owners that ended without a journal, or were ended from outside) after which a message is a suspect.
_MOST_LOSSES = 3
#: Ends of whole consumers that a message may be running in, beyond its attempts. Who takes its consumer along even from
#: a child process (the memory of a whole container) is seen by nobody, and each such end is in doubt.
_MOST_IN_DOUBT = 2


def is_suspect(known: Attempts) -> bool:
    """Return whether the message is to run in a process of its own, by the attempts that are known.

    >>> is_suspect(Attempts(2, 2)), is_suspect(Attempts(1, 0, crashes=1)), is_suspect(Attempts(losses=3))
    (False, True, True)
    """
    return known.crashes > 0 or is_unseen(known)


def is_unseen(known: Attempts) -> bool:
    """Return whether its owners end without a journal: then nobody learns that it ran, unless Redis knows before."""
    return known.losses >= _MOST_LOSSES


def needs_fresh_process(known: Attempts, max_attempts: int) -> bool:
    """Return whether a suspect's process must have run no other message before: the second time, and when its last
    attempt is next, so that its end leaves no doubt.

    >>> [needs_fresh_process(known, 3) for known in (Attempts(1, 0, 1), Attempts(2, 0, 2), Attempts(2, 1, 1))]
    [False, True, True]
    """
    return known.crashes > 1 or min(known.starts, known.failures + known.crashes) + 1 >= max_attempts


def is_used_up(known: Attempts, max_attempts: int) -> bool:
    """Return whether the message may not start again: its attempts are used up, or too many processes in a row have
    ended while it ran.

    >>> is_used_up(Attempts(6, 2, 6), 5), is_used_up(Attempts(7, 0, 7), 5), is_used_up(Attempts(5, 5), 5)
    (False, True, True)
    """
    return known.failures >= max_attempts or known.crashes >= max_attempts + _MOST_IN_DOUBT


class Left(NamedTuple):
    """A start that had not ended when its process did. ``before``: the message's attempts, this start included.

    ``is_blamed``: the process itself noted that it ends because of this one. ``start_us``: microseconds since the
    epoch. ``slot``: its place in the journal of the process that runs it. ``is_apart``: a child process ran it.
    """

    ticket: bytes
    stream_id: bytes
    fence: int
    before: Attempts
    start_us: int
    is_blamed: bool
    slot: int = 0
    is_apart: bool = False

    def facts(self) -> dict[str, Any]:
        of = {"ticket": self.ticket.decode(), "id": self.stream_id.decode(), "fence": self.fence}
        return of | {"attempt": self.before.starts}


def suspects(
    left: Sequence[Left], is_explained: bool, is_from_outside: bool = False, by_itself: bool = False
) -> list[tuple[Left, Attempts]]:
    """Return the attempts to note for the starts that a process left. ``is_explained``: it ended for a reason that it
    knew: then those that it blames are suspects, and the others were only in the way. Else all are, or, where the end
    came from outside, have one more loss; where the process ended ``by_itself``, no child had a part in it."""
    crashes, losses = (0, 1) if is_from_outside and not is_explained else (1, 0)
    return [
        (one, one.before)
        if by_itself and one.is_apart
        else (one, one.before._replace(crashes=one.before.crashes + crashes, losses=one.before.losses + losses))
        for one in left
        if one.is_blamed or not is_explained
    ]
