"""A real nginx for tests, with ``server`` blocks of theirs."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.hands import free_port as free_port
from tests.served import PATIENCE_S

_NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
needs_nginx = pytest.mark.skipif(_NGINX is None, reason="nginx is not installed")


@contextmanager
def nginx(folder: Path, servers: str, port: int) -> Iterator[None]:
    """Run nginx with these ``server`` blocks in http {}, from when ``port`` listens."""
    folders = "".join(
        f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    conf, errors = folder / "nginx.conf", folder / "error.log"
    conf.write_text(
        f"daemon off; pid {folder}/pid; error_log {errors}; events {{}} http {{ access_log off; {folders}\n{servers}}}\n"
    )
    assert _NGINX is not None
    running = subprocess.Popen([_NGINX, "-p", str(folder), "-e", str(errors), "-c", str(conf)])
    try:
        ends_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < ends_s and running.poll() is None, errors.read_text()
                time.sleep(0.05)
        yield
    finally:
        running.terminate()
        running.wait(PATIENCE_S)
