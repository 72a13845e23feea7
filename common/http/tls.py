"""TLS contexts for both sides of HTTPS: one for all connections, rebuilt when the files of the certificate, or of the
authorities, have changed."""

from __future__ import annotations

import logging
import ssl
import threading
from pathlib import Path

from usher.common.base.errors import SettingsError
from usher.common.base.log import event
from usher.common.runtime.file_watch import FileWatch

log = logging.getLogger(__name__)


class ServerTls:
    """A certificate chain and its key, in PEM. Called from several threads."""

    def __init__(self, cert: Path, key: Path | None) -> None:
        """Load the files. Raises SettingsError if a file is unusable."""
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
                    event(
                        log,
                        "certificate_unusable",
                        level=logging.ERROR,
                        why=str(unfit),
                        means="the former certificate stays in use",
                    )
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
    """Return how to serve HTTPS; None without a certificate. Raises SettingsError."""
    return None if cert is None else ServerTls(cert, key)


class ClientTls:
    """The authorities whose certificates are trusted. All connections share them, since a system's authorities are 900
    KB. Called from several threads."""

    def __init__(self, ca: Path | None) -> None:
        """Note the file. ``ca``: authorities in PEM; None: those of the system. Nothing is read yet."""
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
                    event(
                        log,
                        "ca_certificates_unusable",
                        level=logging.ERROR,
                        why=str(unfit),
                        means="the former ones stay in use",
                    )
            return self._context

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.hostname_checks_common_name = False
        return context
