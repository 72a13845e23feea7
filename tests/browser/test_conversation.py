"""A conversation (examples/conversation.py) in a browser: its text grows as the model speaks, and a button stops it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.browser.looking import Looking
from tests.hands import EmbeddedRedis
from tests.process.crew import Crew
from tests.process.machine import ROOT
from usher import Producer

_MODEL = """
import asyncio, time
from examples import conversation

async def words(asked):
    for _ in range(500 if "long" in asked else 60):
        await asyncio.sleep(0.05)
        yield str(time.time() * 1000)

conversation.model = words
converse = conversation.converse
"""
#: What an application's own page does.
_FOLLOW = """(uid) => {
    const events = new EventSource(`/api/messages/${uid}/events`);
    const say = (kind, text, late) => {
        const said = document.createElement('span');
        said.className = kind; said.textContent = text + ' '; said.dataset.late = late;
        document.body.append(said);
    };
    events.addEventListener('progress', (event) => {
        const word = JSON.parse(event.data).json;
        say('word', word, performance.timeOrigin + performance.now() - word);
    });
    events.addEventListener('result', (event) => { say('answer', event.data, 0); events.close(); });
}"""


def test_the_text_of_a_conversation_grows_in_a_browser_and_a_button_stops_it(chromium: Any, tmp_path: Path) -> None:
    (tmp_path / "talks.py").write_text(_MODEL)
    with EmbeddedRedis(tmp_path / "redis", port=None, durable=False) as server, Crew(tmp_path, server.url) as crew:
        crew.start(1, ["c1"], "talks:converse", PYTHONPATH=f"{tmp_path}:{ROOT}")
        context = chromium.new_context(base_url=crew.masters[0])
        looking = Looking(context, SimpleNamespace(url=crew.masters[0]))  # type: ignore[arg-type]
        producer, page = Producer(server.url), looking.page
        looking.go("/")
        producer.send_followed("chat-1", {"text": "Where is my order?"}, "turn-1")
        page.evaluate(_FOLLOW, "turn-1")
        words, answer = page.locator("span.word"), page.locator("span.answer")
        words.nth(1).wait_for()
        assert words.count() < 50
        answer.wait_for()
        late_ms = sorted(words.evaluate_all("(all) => all.map((one) => Number(one.dataset.late))"))
        assert len(late_ms) == 60
        assert late_ms[30] <= 20, late_ms
        assert json.loads(answer.inner_text())["json"]["stopped"] is False

        producer.send_followed("chat-1", {"text": "a long story"}, "turn-2")
        looking.go("/")
        page.evaluate(_FOLLOW, "turn-2")
        words.nth(1).wait_for()
        person = Looking(context, SimpleNamespace(url=crew.masters[0]))  # type: ignore[arg-type]
        person.go("/tickets/chat-1")
        person.page.get_by_role("button", name="Interrupt...").click()
        person.page.get_by_role("textbox", name="Reason").fill("he pressed stop")
        person.page.get_by_role("button", name="Interrupt", exact=True).click()
        answer.wait_for()
        assert json.loads(answer.inner_text())["json"]["stopped"] is True
        person.see("is told to end")
        person.see("idle")
        producer.close()
        context.close()
        assert not looking.troubles + person.troubles
