"""The page at a path prefix behind a real nginx, as an operator clicks through it, with scripts and live."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.looking import OPERATOR, Looking, System, running_system
from tests.nginx import free_port, needs_nginx, nginx

pytestmark = [pytest.mark.process, needs_nginx]

_PREFIX = "/ops/usher"


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running_system(USHER_PROXIES="127.0.0.1") as made:
        yield made


@pytest.mark.parametrize(("how", "end"), [("kept", ""), ("stripped", "/")])
def test_from_the_overview_to_a_message_and_an_action(
    chromium: Any, system: System, tmp_path: Path, how: str, end: str
) -> None:
    port, master, ticket = free_port(), system.url, f"shop-{how}"
    passed = "proxy_http_version 1.1; proxy_set_header Host $http_host; proxy_buffering off;"
    passed += f" proxy_set_header X-Forwarded-Prefix {_PREFIX};"
    server = f"server {{ listen 127.0.0.1:{port}; location {_PREFIX}/ {{ proxy_pass {master}{end}; {passed} }} }}"
    [failing] = system.send(ticket, do="fail", says="no account")
    with nginx(tmp_path, server, port):
        looking = Looking(chromium.new_context(viewport={"width": 1280, "height": 800}), system)
        looking.root = f"http://127.0.0.1:{port}{_PREFIX}"
        page = looking.page
        looking.sign_in(OPERATOR)
        group = page.locator(".group", has_text="retrying").first
        group.wait_for()
        page.locator("#link", has_text="Live").wait_for()  # the events of the overview come through
        group.get_by_role("link", name="List").click()
        page.locator("tr", has_text=ticket).get_by_role("link", name=failing).click()
        page.get_by_text("no account").locator("visible=true").first.wait_for()
        page.locator("#message").get_by_role("link", name=ticket).click()
        page.locator("#link", has_text="Live").wait_for()  # and those of a ticket
        page.get_by_role("button", name="Pause ticket...").click()
        page.locator("#why-pause").fill(f"seen {how}")
        page.get_by_role("button", name="Pause ticket", exact=True).click()
        page.get_by_role("button", name="Resume ticket...").wait_for()
        page.get_by_role("link", name="Actions").click()
        looking.see(f"seen {how}")
        page.get_by_role("button", name="Sign out").click()
        page.get_by_label("Token").wait_for()
        assert page.url.startswith(f"{looking.root}/login")
        looking.look_for_reports()
        page.context.close()
    assert not looking.troubles
