"""Values made of files, and made anew when these have changed; and so the TLS context of a server, one for all
connections."""

from __future__ import annotations

import contextlib
import math
import ssl
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from usher.common.base.clock import now_s
from usher.common.base.errors import SettingsError
from usher.common.base.log import ERROR, event

T = TypeVar("T")

#: Seconds until a failed read is repeated although nothing has changed: the fault may have been ours, with no file
#: descriptor left.
_AGAIN_S = 60.0


class FileValue(Generic[T]):
    """A value that ``make`` makes of files, looked at once in ``every_s``. New ones that cannot be used (SettingsError,
    OSError) change nothing. ``tell`` hears of them, and (None) that the value is new. Called from several threads."""

    def __init__(
        self,
        files: Sequence[Path],
        make: Callable[[], T],
        tell: Callable[[SettingsError | OSError | None], None],
        every_s: float = 0.0,
    ) -> None:
        """Make the value. Raises what ``make`` raises."""
        self._files, self._make, self._tell, self._every_s = files, make, tell, every_s
        self._lock = threading.Lock()  # held by the thread that looks
        self._seen, self._looked_s, self._again_s = self._look(), now_s(), math.inf
        self._value = make()

    def get(self) -> T:
        if now_s() - self._looked_s < self._every_s or not self._lock.acquire(blocking=False):
            return self._value
        try:
            self._looked_s, seen = now_s(), self._look()
            if seen != self._seen or now_s() >= self._again_s:
                self._seen, self._again_s = seen, math.inf
                self._value = self._make()
                self._tell(None)
        except (SettingsError, OSError) as unfit:
            self._again_s = now_s() + _AGAIN_S
            self._tell(unfit)
        finally:
            self._lock.release()
        return self._value

    def _look(self) -> list[tuple[int, ...]]:
        """Return values that change when a file does; the inode's time also changes with its owner or mode, which may
        make it readable at last."""
        seen = list[tuple[int, ...]]()
        for file in self._files:
            with contextlib.suppress(OSError):
                found = file.stat()
                seen.append((found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
        return seen


class ServerTls(FileValue[ssl.SSLContext]):
    """The context for new connections of a server: a certificate chain and its key, in PEM."""

    def __init__(self, cert: Path, key: Path | None) -> None:
        self.cert, self._key = cert.expanduser(), (key or cert).expanduser()
        super().__init__((self.cert, self._key), self._load, self._told)

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.cert, self._key)
        except (OSError, ssl.SSLError) as problem:
            why = problem.strerror or type(problem).__name__
            raise SettingsError(
                [f"USHER_TLS_CERT, USHER_TLS_KEY: {self.cert} and {self._key} cannot be used: {why}"]
            ) from None
        return context

    def _told(self, unfit: SettingsError | OSError | None) -> None:
        if unfit is None:
            event("certificate_reloaded", file=str(self.cert))
        else:
            event("certificate_unusable", level=ERROR, why=str(unfit), means="the former certificate stays in use")


def server_tls(cert: Path | None, key: Path | None) -> ServerTls | None:
    return None if cert is None else ServerTls(cert, key)
