"""``deploy/nginx.conf`` in a real nginx, in front of a real program: slow clients hold none of its threads."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import requests

from tests.served import PATIENCE_S, Running
from tests.tls_front import Papers

_CONF = Path(__file__).resolve().parents[2] / "deploy" / "nginx.conf"
_CHILD = "from tests.integration.test_serving import child; child()"
_NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")


@pytest.mark.skipif(_NGINX is None, reason="nginx is not installed")
def test_behind_nginx_a_request_comes_whole_and_slow_clients_hold_nobody_up(tmp_path: Path) -> None:
    papers, running = Papers(tmp_path), Running(tmp_path, {}, _CHILD)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    try:
        running.wait_until_up()
        conf = _CONF.read_text()
        for told, ours in (
            ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
            ("/etc/ssl/usher.pem", str(papers.cert)),
            ("/etc/ssl/usher.key", str(papers.key)),
            ("127.0.0.1:8700", f"127.0.0.1:{running.port}"),
            ("server_name usher.example.org", "server_name localhost"),
        ):
            assert told in conf
            conf = conf.replace(told, ours)
        folders = "".join(
            f"{name}_temp_path {tmp_path}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        whole = (
            f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error.log; events {{}} http {{ access_log off;"
            f" {folders}\n{conf}}}\n"
        )
        (tmp_path / "nginx.conf").write_text(whole)
        assert _NGINX is not None
        nginx = subprocess.Popen(
            [_NGINX, "-p", str(tmp_path), "-e", f"{tmp_path}/error.log", "-c", str(tmp_path / "nginx.conf")]
        )
        try:
            ends_s = time.monotonic() + PATIENCE_S
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    assert time.monotonic() < ends_s and nginx.poll() is None, (tmp_path / "error.log").read_text()
                    time.sleep(0.05)
            with ExitStack() as connections:
                for _ in range(40):
                    connections.enter_context(closing(socket.create_connection(("127.0.0.1", port))))
                began_s = time.monotonic()
                url = f"https://localhost:{port}"
                assert requests.get(f"{url}/", verify=str(papers.ca), timeout=PATIENCE_S).json() == {
                    "pid": running.worker
                }
                assert requests.post(f"{url}/read", b"x" * 9000, verify=str(papers.ca), timeout=PATIENCE_S).json() == {
                    "length": 9000
                }
                assert time.monotonic() - began_s < 4
        finally:
            nginx.terminate()
            nginx.wait(PATIENCE_S)
    finally:
        running.kill()
