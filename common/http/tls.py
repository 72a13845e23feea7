"""TLS contexts for both sides of HTTPS: one for all connections, rebuilt when the files of the certificate, or of the
authorities, have changed; and the watch on such files."""

from __future__ import annotations

import logging
import math
import ssl
import threading
from pathlib import Path

from usher.common.base.clock import now_s
from usher.common.base.errors import SettingsError
from usher.common.base.log import event

log = logging.getLogger(__name__)

#: Seconds until a failed read is repeated although nothing has changed: the fault may have been ours, with no file
#: descriptor left.
_AGAIN_S = 60.0


class FileWatch:
    """A watch on files that tells when they differ from what was read. For one thread at a time."""

    def __init__(self, *files: Path) -> None:
        self._files = files
        self._seen = self._look()
        self._again_s = math.inf

    def are_new(self) -> bool:
        """Return True if the files are to be read now; they count as read then, unless ``failed`` is called."""
        seen = self._look()
        if seen == self._seen and now_s() < self._again_s:
            return False
        self._seen, self._again_s = seen, math.inf
        return True

    def failed(self) -> None:
        """Note that the files could not be used: try again when they change, or after a while."""
        self._again_s = now_s() + _AGAIN_S

    def _look(self) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(map(_state_of, self._files))


def _state_of(file: Path) -> tuple[int, ...] | None:
    """Return values that change when the file does; the inode's time also changes with its owner or mode, which may
    make it readable at last."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class ServerTls:
    """A certificate chain and its key, in PEM. Called from several threads."""

    def __init__(self, cert: Path, key: Path | None) -> None:
        self.cert, self._key = cert.expanduser(), (key or cert).expanduser()
        self._lock = threading.Lock()
        self._files = FileWatch(self.cert, self._key)
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection. New files that cannot be used change nothing, and are reported in
        the log."""
        with self._lock:
            if self._files.are_new():
                try:
                    self._context = self._load()
                    event(log, "certificate_reloaded", file=str(self.cert))
                except SettingsError as unfit:
                    self._files.failed()
                    means = "the former certificate stays in use"
                    event(log, "certificate_unusable", level=logging.ERROR, why=str(unfit), means=means)
            return self._context

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


def server_tls(cert: Path | None, key: Path | None) -> ServerTls | None:
    return None if cert is None else ServerTls(cert, key)


class ClientTls:
    """The authorities whose certificates are trusted. All connections share them, since a system's authorities are 900
    KB. Called from several threads."""

    def __init__(self, ca: Path | None) -> None:
        self._ca = None if ca is None else ca.expanduser()
        self._lock = threading.Lock()
        file = self._ca or ssl.get_default_verify_paths().cafile
        self._files = FileWatch(*([Path(file)] if file else []))
        self._context: ssl.SSLContext | None = None

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection. Raises OSError when no authorities could ever be read. Later files
        that cannot be used change nothing, and are reported in the log."""
        with self._lock:
            if self._files.are_new() or self._context is None:
                try:
                    self._context = self._load()
                except OSError as unfit:
                    if self._context is None:
                        raise
                    self._files.failed()
                    means = "the former ones stay in use"
                    event(log, "ca_certificates_unusable", level=logging.ERROR, why=str(unfit), means=means)
            return self._context

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.hostname_checks_common_name = False
        return context
