"""What an action has to say on the page that comes after it. Kept here and named by a number: a link could else make a
page say anything."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict

_KEPT = 200


class FlashMessages:
    """The last ones of this master."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, text: str) -> str:
        """Its name, for the query ``said``."""
        name = secrets.token_urlsafe(9)
        with self._lock:
            self._texts[name] = text
            while len(self._texts) > _KEPT:
                self._texts.popitem(last=False)
        return name

    def get(self, name: str) -> str:
        """Its text, or ""."""
        with self._lock:
            return self._texts.get(name, "")
