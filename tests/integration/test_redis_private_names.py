"""The private names of redis-py that Usher uses: there, and of the same meaning."""

from __future__ import annotations

import contextlib
import socket

from usher.common.redis.endpoints import server_of
from usher.common.redis.private_names import hear_changes, socket_of


def test_the_socket_is_what_leads_to_the_server(redis_url: str) -> None:
    connection = server_of(redis_url).connection("test:private", 2.0)
    assert socket_of(connection) is None
    connection.connect()
    with contextlib.closing(socket_of(connection)) as sock:
        assert isinstance(sock, socket.socket)
        sock.sendall(b"PING\r\n")
        assert sock.recv(100) == b"+PONG\r\n"
        connection.disconnect()
    assert socket_of(connection) is None


def test_reports_of_changes_are_heard_while_replies_are_read(redis_url: str) -> None:
    connection, news = server_of(redis_url).connection("test:private", 2.0), list[list[bytes] | None]()
    connection.connect()
    connection.protocol = 3
    hear_changes(connection, news.append)
    for command in ("HELLO 3", "CLIENT TRACKING ON BCAST", "SET private 1"):
        connection.send_command(*command.split())
        connection.read_response()
    connection.read_response(push_request=True)
    connection.disconnect()
    assert news == [[b"private"]]
