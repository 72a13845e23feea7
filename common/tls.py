"""The server's side of HTTPS: one context per program, made anew when the certificate's files have changed."""

from __future__ import annotations

import logging
import ssl
import threading
from pathlib import Path

from common.errors import SettingsError
from common.log import event

log = logging.getLogger(__name__)


class ServerTls:
    """A certificate chain and its key, in PEM. Called from several threads."""

    def __init__(self, cert: Path, key: Path | None, sockets: type[ssl.SSLSocket] = ssl.SSLSocket) -> None:
        """``sockets``: what wrapped connections are made of. Raises SettingsError when the files cannot be used."""
        self.cert, self._key = cert.expanduser(), (key or cert).expanduser()
        self._sockets = sockets
        self._lock = threading.Lock()
        self._state = self._look()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """The context for a new connection. Files that cannot be used any more change nothing, and are told in the log."""
        with self._lock:
            state = self._look()
            if state != self._state:
                self._state = state
                try:
                    self._context = self._load()
                    event(log, "certificate_read_again", file=str(self.cert))
                except SettingsError as unfit:
                    event(log, "certificate_unusable", level=logging.ERROR, why=str(unfit), means="the certificate of before stays in use")
            return self._context

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.sslsocket_class = self._sockets
        try:
            context.load_cert_chain(self.cert, self._key)
        except (OSError, ssl.SSLError) as problem:
            why = problem.strerror or type(problem).__name__
            raise SettingsError([f"USHER_TLS_CERT, USHER_TLS_KEY: {self.cert} and {self._key} cannot be used: {why}"]) from None
        return context

    def _look(self) -> tuple[tuple[int, int], ...]:
        found = []
        for file in (self.cert, self._key):
            try:
                stat = file.stat()
                found.append((stat.st_mtime_ns, stat.st_ino))
            except OSError:
                found.append((0, 0))
        return tuple(found)
