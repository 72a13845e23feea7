"""Judge whether handlers make progress: whether any of them ends. Pure."""

from __future__ import annotations

#: No handler ended for so long: that is worth a word, unless it is usual here. It is told again at twice the time.
LONG_S = 60.0
#: Times the longest pause that ended by itself: so much longer is unusual.
_UNUSUAL = 3


class HandlerProgress:
    """The progress of one consumer's handlers, as it was seen. Long ones are legitimate: nothing is done about them."""

    def __init__(self, now_s: float) -> None:
        self._ended = 0
        self._since_s = now_s
        self._usual_s = 0.0
        self._told_s = 0.0
        self.still_s = 0.0  # for how long no handler has ended, while some ran

    def seen(self, ended: int, running: int, now_s: float) -> None:
        """Take a look: how many handlers have ended so far, and how many run."""
        if ended != self._ended:
            self._usual_s = max(self._usual_s, self.still_s)
        if ended != self._ended or not running:
            self._ended, self._since_s, self._told_s = ended, now_s, 0.0
        self.still_s = now_s - self._since_s

    @property
    def is_unusual(self) -> bool:
        return self.still_s >= max(LONG_S, _UNUSUAL * self._usual_s)

    def is_to_be_told(self) -> bool:
        """Return whether it is time to tell that no handler ends."""
        if not self.is_unusual or self.still_s < 2 * self._told_s:
            return False
        self._told_s = self.still_s
        return True
