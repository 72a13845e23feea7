"""Keep an action's message for the page that comes after it. The link has only a random name: otherwise a link could
make a page show any text."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict

_KEPT = 200


class FlashMessages:
    """The last messages of this master."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, text: str) -> str:
        """Keep a message; return its name, for the query ``said``."""
        name = secrets.token_urlsafe(9)
        with self._lock:
            self._texts[name] = text
            while len(self._texts) > _KEPT:
                self._texts.popitem(last=False)
        return name

    def get(self, name: str) -> str:
        """Return the message of that name, or ""."""
        with self._lock:
            return self._texts.get(name, "")
