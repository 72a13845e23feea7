"""TLS for tests: certificates of a CA of our own, and TLS in front of a Redis, since the embedded redis-server is built
without."""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

import trustme


class Papers:
    """A CA, and a certificate of it for this machine, as files."""

    def __init__(self, folder: Path) -> None:
        self._ca = trustme.CA()
        self.ca, self.cert, self.key = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
        self._ca.cert_pem.write_to_path(str(self.ca))
        self.issue()

    def issue(self) -> None:
        issued = self._ca.issue_cert("127.0.0.1", "localhost")
        self.key.write_bytes(issued.private_key_pem.bytes())
        self.cert.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))


class TlsFront:
    """TLS in front of a Redis, as a proxy or its own ``tls-port`` would do it; ``behind`` is its unix socket, or its
    port here.

    ``plain_too``: who speaks no TLS is let through as well, as a Sentinel is that watches the port which it names to
    clients. ``client_too``: clients must show a certificate of the same CA.
    """

    def __init__(self, papers: Papers, behind: str | int, plain_too: bool = False, client_too: bool = False) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(papers.cert, papers.key)
        if client_too:
            self._context.verify_mode = ssl.CERT_REQUIRED
            self._context.load_verify_locations(papers.ca)
        self.behind = behind
        self._plain_too = plain_too
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.served = self.refused = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        outside = plain
        try:
            if not self._plain_too or plain.recv(1, socket.MSG_PEEK) == b"\x16":
                outside = self._context.wrap_socket(plain, server_side=True)
                self.served += 1
            inside = self._inside()
        except OSError:
            self.refused += 1
            plain.close()
            return
        with outside, inside:
            threading.Thread(target=_copy, args=(inside, outside), daemon=True).start()
            _copy(outside, inside)

    def _inside(self) -> socket.socket:
        if isinstance(self.behind, int):
            return socket.create_connection(("127.0.0.1", self.behind))
        inside = socket.socket(socket.AF_UNIX)
        inside.connect(self.behind)
        return inside

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65_536):
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
