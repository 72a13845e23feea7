"""A real master at a path prefix behind a real nginx, which keeps the prefix or strips it: whatever a page leads to is
below the prefix, and answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest
import requests

from tests.doors import tokens_file
from tests.hands import Role
from tests.nginx import free_port, needs_nginx, nginx
from tests.process.crew import KEYS, Crew
from tests.served import PATIENCE_S
from usher import Link

pytestmark = [pytest.mark.process, needs_nginx]

_PREFIX = "/ops/usher"
_TOKEN = "operator-of-this-test"
_NAMED = {"Authorization": f"Bearer {_TOKEN}"}
#: Where a page leads, by attribute.
_LEADS = ("href", "src", "action", "formaction")
#: A ticket whose slashes a proxy that decodes paths would merge.
_TICKET = "a//b"
FILES = {
    "shop.py": """
from usher import GiveUp

def handle(message):
    if message.ticket_id == "bad":
        raise GiveUp("refused")
    if message.ticket_id == "a//b":
        raise ValueError("again")
"""
}


@pytest.fixture
def behind(folder: Path, redis_url: str, link: Link) -> Iterator[dict[str, str]]:
    """Addresses of the master behind nginx: ``kept`` and ``stripped``. A consumer has registered through the first."""
    kept, stripped = free_port(), free_port()
    with Crew(
        folder,
        redis_url,
        USHER_PROXIES="127.0.0.1",
        USHER_TOKENS_FILE=tokens_file(
            folder, (Role.OPERATOR, "operator", _TOKEN), (Role.CONSUMER, "*", "consumer-of-this-test")
        ),
    ) as crew:
        crew.start_master()
        [master] = crew.masters
        passed = "proxy_set_header Host $http_host; proxy_buffering off; proxy_http_version 1.1;"
        passed += f" proxy_set_header X-Forwarded-Prefix {_PREFIX};"
        servers = "".join(
            f"server {{ listen 127.0.0.1:{port}; location {_PREFIX}/ {{ proxy_pass {master}{end}; {passed} }} }}\n"
            for port, end in ((kept, ""), (stripped, "/"))
        )
        for ticket in ("good", "bad", _TICKET):
            link.call("XADD", KEYS.stream, "*", "ticket_id", ticket)
        with nginx(folder, servers, kept):
            through = f"http://127.0.0.1:{kept}{_PREFIX}"
            crew.until(lambda: requests.get(f"{through}/api/health", timeout=PATIENCE_S).ok, 30, "the master is well")
            crew.masters = [through]
            crew.start_consumer(
                "c1",
                "shop:handle",
                USHER_API_TOKEN="consumer-of-this-test",
                USHER_TOKENS_FILE="",
                USHER_RETRY_SECONDS="600",
            )
            crew.until(lambda: link.call("XLEN", KEYS.dead) == 1 and link.call("HLEN", KEYS.attempts) == 1, 30, "runs")
            yield {"kept": through, "stripped": f"http://127.0.0.1:{stripped}{_PREFIX}"}


class _Leads(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: set[tuple[str, str]] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {(name, value or "") for name, value in attrs if name in _LEADS}


def _signed_in(root: str) -> requests.Session:
    """A browser that has followed the redirect to the log-in and signed in there."""
    browser = requests.Session()
    browser.headers["Accept"] = "text/html"
    answered = browser.get(f"{root}/tickets?q=x", timeout=PATIENCE_S)
    assert urlsplit(answered.url).path == f"{_PREFIX}/login"
    wanted = re.search(r'name="next" value="([^"]+)"', answered.text)
    assert wanted is not None
    answered = browser.post(answered.url, {"token": _TOKEN, "next": wanted[1]}, timeout=PATIENCE_S)
    assert answered.url == f"{root}/tickets?q=x"
    assert [cookie.path for cookie in browser.cookies] == [_PREFIX]
    return browser


def _walk(browser: requests.Session, root: str) -> set[str]:
    """Ask all that pages lead to, from the overview on. Returns the paths, without the prefix."""
    waiting, seen = [("href", f"{root}/")], set[str]()
    while waiting:
        attribute, url = waiting.pop()
        if url in seen:
            continue
        seen.add(url)
        assert len(seen) < 300, "the walk does not end"
        if attribute in ("action", "formaction"):
            assert browser.options(url, timeout=PATIENCE_S).status_code == 200, url
            continue
        answered = browser.get(url, timeout=PATIENCE_S)
        assert answered.status_code == 200, url
        if not answered.headers["Content-Type"].startswith("text/html"):
            continue
        for name, value in _Leads(answered.text).found:
            if not value.startswith("#"):
                assert value.startswith(f"{_PREFIX}/"), (url, name, value)
                waiting.append((name, urljoin(url, value).partition("#")[0]))
    return {url.removeprefix(root) for url in seen}


def test_whatever_a_page_leads_to_is_below_the_prefix_and_answers(behind: dict[str, str]) -> None:
    for how, root in behind.items():
        browser = _signed_in(root)
        walked = _walk(browser, root)
        assert {"/", "/tickets/bad", "/actions", "/dead-letters/redrive", "/logout"} <= walked
        assert "/static/usher.js" in walked
        if how == "kept":  # nginx passes the path as it came; where it strips, it decodes it, and merges the slashes
            assert "/tickets/a%2F%2Fb" in walked
        assert f'href="{_PREFIX}/"' in browser.get(f"{root}/nowhere", timeout=PATIENCE_S).text, "a problem's page"
        document = requests.get(f"{root}/api/openapi.json", headers=_NAMED, timeout=PATIENCE_S).json()
        assert document["servers"] == [{"url": _PREFIX}]
        refused = requests.get(f"{root}/api/messages/1-1", headers=_NAMED, timeout=PATIENCE_S)
        assert (refused.status_code, refused.json()["title"]) == (404, "unknown_message")

    letter = next(path for path in walked if re.fullmatch(r"/dead-letters/[0-9-]+", path))
    page = browser.get(f"{root}{letter}", timeout=PATIENCE_S)
    token = re.search(r'name="csrf_token" value="([^"]+)"', page.text)
    assert token is not None
    form = {"csrf_token": token[1], "id": letter.rpartition("/")[2], "back": "/dead-letters?ticket=bad"}
    ours = {"Origin": root.removesuffix(_PREFIX)}
    done = browser.post(f"{root}/dead-letters/redrive", form, headers=ours, timeout=PATIENCE_S)
    assert (done.history[0].status_code, done.status_code) == (303, 200)
    assert done.url.startswith(f"{root}/dead-letters?ticket=bad&said=")
    assert "added 1" in done.text
