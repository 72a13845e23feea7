"""``deploy/nginx.conf`` in a real nginx, in front of a real program: slow clients hold none of its threads."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, closing
from pathlib import Path

import requests

from tests.nginx import free_port, needs_nginx, nginx
from tests.served import PATIENCE_S, Running
from tests.tls_front import Papers

_CONF = Path(__file__).resolve().parents[2] / "deploy" / "nginx.conf"
_CHILD = "from tests.integration.test_serving import child; child()"


@needs_nginx
def test_behind_nginx_a_request_comes_whole_and_slow_clients_hold_nobody_up(tmp_path: Path) -> None:
    papers, running, port = Papers(tmp_path), Running(tmp_path, {}, _CHILD), free_port()
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
        with nginx(tmp_path, conf, port), ExitStack() as connections:
            for _ in range(40):
                connections.enter_context(closing(socket.create_connection(("127.0.0.1", port))))
            began_s = time.monotonic()
            url = f"https://localhost:{port}"
            assert requests.get(f"{url}/", verify=str(papers.ca), timeout=PATIENCE_S).json() == {"pid": running.worker}
            assert requests.post(f"{url}/read", b"x" * 9000, verify=str(papers.ca), timeout=PATIENCE_S).json() == {
                "length": 9000
            }
            assert time.monotonic() - began_s < 4
    finally:
        running.kill()
