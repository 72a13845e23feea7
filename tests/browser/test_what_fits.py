"""The page has room for what it shows: long values, the search box; buttons are where there is something to act on."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.browser.looking import OPERATOR, Looking, System, running_system
from tests.hands import LogKeys
from tests.process.crew import KEYS
from tests.process.machine import until

pytestmark = [pytest.mark.process, pytest.mark.slow]

_LONG = "no account of that name at any of the banks that were asked " * 4
#: Width of the placeholder, and of the place for it.
_PLACEHOLDER = """(input) => {
    const style = getComputedStyle(input), pen = document.createElement('canvas').getContext('2d');
    pen.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
    return [pen.measureText(input.placeholder).width,
            input.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight)];
}"""


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running_system(USHER_SHOWN_FIELDS="says") as made:
        yield made


def test_a_long_value_takes_one_line_and_is_whole_under_the_pointer(looking: Looking, system: System) -> None:
    system.send("long-1", do="fail", says=_LONG)
    system.send("long-2", do="hang", says="short")
    looking.sign_in(OPERATOR)
    page = looking.page
    for path in ("/tickets", "/tickets/long-1", "/tickets?q=do%3Dfail"):
        looking.go(path)
        value = page.locator("td.shown bdi", has_text="no account").first
        assert value.get_attribute("title") == _LONG, path
        assert value.evaluate("one => one.scrollWidth > one.clientWidth"), path
        assert value.bounding_box()["height"] < 30, path
    looking.go("/tickets")
    short = page.locator("td.shown bdi", has_text="short").first
    assert short.evaluate("one => one.scrollWidth <= one.clientWidth"), "what fits is not cut"


def test_the_placeholder_of_the_search_is_whole(looking: Looking, system: System) -> None:
    """With counts beside the names of pages, which take room from it."""
    letters = system.letters()
    for number in range(12):
        system.send(f"given-up-{number}", do="give up")
    until(lambda: system.letters() == letters + 12, 30, "they are dead letters")
    looking.sign_in(OPERATOR)
    page = looking.page
    looking.go("/tickets/long-2")
    page.get_by_role("button", name="Pause ticket").click()
    page.get_by_role("button", name="Resume ticket").wait_for()
    for width in (1280, 1024, 400):
        page.set_viewport_size({"width": width, "height": 800})
        needed, has = page.locator("#search").evaluate(_PLACEHOLDER)
        assert needed <= has, width


def test_the_bar_is_one_line_with_large_counts(looking: Looking) -> None:
    looking.sign_in(OPERATOR)
    looking.go("/doctor")
    page = looking.page
    page.set_viewport_size({"width": 1280, "height": 800})
    for name, count in {"Overview": "50+", "Dead letters": "89,981", "Rules": "12"}.items():
        link = page.get_by_role("navigation").get_by_role("link", name=name).first
        link.evaluate(
            "(one, count) => { one.innerHTML = `${one.firstChild.data} <span class=count>${count}</span>`; }", count
        )
    tops = page.locator(".bar > *").evaluate_all(
        "all => all.map(one => one.getBoundingClientRect()).map(b => b.bottom)"
    )
    assert max(tops) - min(tops) < 20, tops


def test_nothing_offers_to_act_on_no_delayed_message(looking: Looking, system: System) -> None:
    looking.sign_in(OPERATOR)
    looking.go("/delayed")
    page = looking.page
    looking.see("nothing waits for its time")
    assert page.get_by_role("button", name="Send now...").count() == 0
    due_ms = int((time.time() + 3600) * 1000)
    system.link.call("XADD", LogKeys(KEYS.stream).delayed, "*", "due_ms", due_ms, "ticket_id", "later")
    page.get_by_role("button", name="Send now...").wait_for()  # with the row, which comes by itself
    assert page.locator("#delayed-list tbody tr").count() == 1
