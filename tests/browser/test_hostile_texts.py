"""What others write is shown literally, wherever it is shown: no dialog, no policy report, no request that leaves."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from tests.browser.looking import OPERATOR, Looking, System
from tests.hands import ticket_url, visible
from tests.process.machine import until

pytestmark = pytest.mark.process

CORPUS = (
    "<img src=x onerror=alert(1)>", '"><svg/onload=alert(1)>', "javascript:alert(1)", "{{7*7}}",
    "</script><script>alert(1)</script>", "' onfocus=alert(1) autofocus x='", "left\u202eright", "nul\0nul", "..",
    "a/b//c?d#e%2f", "//evil.example/x", "&lt;b&gt;",
)  # fmt: skip
_ALIEN = "document.querySelectorAll('main img, main svg:not(.spark, .gantt), main script, [onerror], [onload], [onfocus]').length"


def test_hostile_texts_are_shown_literally_everywhere(looking: Looking, system: System) -> None:
    (system.folder / "mended").unlink(missing_ok=True)
    before = system.letters()
    for text in CORPUS:
        system.send(text, do="hang")
        system.send(f"dead {text}", do="give up", says=text, **{text: text})
    until(lambda: system.letters() == before + len(CORPUS), 30, "all are dead letters")
    looking.sign_in(OPERATOR)
    page = looking.page
    for text in CORPUS:
        page.locator("#stuck bdi", has_text=visible(text)).first.wait_for(state="attached")
    clean(looking)
    for path in ("/tickets", "/dead-letters"):
        looking.go(path)
        told = page.locator("main").inner_text()
        assert [text for text in CORPUS if visible(text) not in told] == []
        clean(looking)
    for at, text in enumerate(CORPUS):
        looking.go(ticket_url(f"dead {text}"))
        assert page.locator("h1 bdi").inner_text() == visible(f"dead {text}")
        assert f"GiveUp: {visible(text)}" in page.locator("#story").inner_text()
        clean(looking)
        if at < 3:
            page.locator("#story a[href^='/messages/']").first.click()
            assert visible(text) in page.locator(".fields").inner_text()
            clean(looking)
    looking.go(ticket_url(".."))
    assert page.locator("h1 bdi").inner_text() == ".."


def test_hostile_queries_are_shown_literally_or_refused(looking: Looking) -> None:
    """A few in a browser; all of them are in tests/integration/test_page_texts.py."""
    looking.sign_in(OPERATOR)
    for path in ("/tickets?q=", "/dead-letters?error=", "/?said=", "/consumers?name="):
        for text in CORPUS[:3]:
            looking.go(path + quote(text, safe=""))
            clean(looking)


def clean(looking: Looking) -> None:
    looking.look_for_reports()
    assert not looking.troubles
    assert looking.page.evaluate(_ALIEN) == 0
