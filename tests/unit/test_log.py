from __future__ import annotations

import asyncio
import json
import logging
import re

import pytest

from usher.common.base.log import WARNING, configure, event, in_hand, redacted
from usher.common.runtime.settings import CommonSettings

_log = logging.getLogger("tests.log")


#: A time with its zone (ISO 8601).
_TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"


def _lines(capfd: pytest.CaptureFixture[str]) -> list[str]:
    captured = capfd.readouterr()
    assert captured.out == "", "logs go to stderr: stdout belongs to the commands"
    return captured.err.removesuffix("\n").split("\n")


def test_a_line_for_people_has_time_level_program_thread_action_and_facts(capfd: pytest.CaptureFixture[str]) -> None:
    configure("master", "info", "human")
    event("ticket_handed_over", ticket="42", owner="c1:7", after_s=0.25, id=b"5-1")
    (line,) = _lines(capfd)
    assert re.fullmatch(
        rf"{_TIME} INFO +master MainThread ticket_handed_over ticket=42 owner=c1:7 after_s=0\.250 id=5-1", line
    )


@pytest.mark.parametrize(
    "ticket", ["42\n00:00:00.000 INFO master intake all_is_well", "a b=c", "\x1b[31m", "\u2028x", "\x00", ""]
)
@pytest.mark.parametrize("style", ["human", "json"])
def test_a_ticket_id_cannot_fake_a_line_or_a_fact(style: str, ticket: str, capfd: pytest.CaptureFixture[str]) -> None:
    configure("master", "info", style)
    event("ticket_handed_over", ticket=ticket, owner="c1:7")
    (line,) = _lines(capfd)
    if style == "human":
        assert line.isprintable()
        assert re.search(r' ticket=(".*"|\'.*\') owner=c1:7$', line)
    else:
        assert json.loads(line)["ticket"] == ticket


def test_no_text_of_others_can_fake_a_line_or_act_on_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    configure("consumer", "info", "human")
    evil = "no\n00:00:00.000 INFO master intake all_is_well\r\x1b[2J\u202e"
    try:
        raise ValueError(evil)
    except ValueError:
        _log.exception("failed: %s", evil)
    first, *others = _lines(capfd)
    assert re.match(rf"{_TIME} ERROR +consumer MainThread failed: no$", first)
    assert all(line.startswith("    ") and line.isprintable() for line in others), others
    assert sum("all_is_well" in line for line in others) == 2
    assert "    Traceback (most recent call last):" in others


def test_a_json_line_is_one_object_and_takes_any_fact(capfd: pytest.CaptureFixture[str]) -> None:
    configure("consumer", "info", "json")
    event("service_retrying", level=WARNING, problem=ValueError("no"), id=b"5-1", raw=b"\xff")
    (line,) = _lines(capfd)
    document = json.loads(line)
    assert document["event"] == document["message"] == "service_retrying"
    assert document["logger"] == __name__ and re.fullmatch(_TIME, document["timestamp"])
    assert document["level"] == "WARNING"
    assert document["program"] == "consumer"
    assert document["problem"] == "no"


@pytest.mark.parametrize("style", ["human", "json"])
def test_a_password_is_never_logged_wherever_it_stands(style: str, capfd: pytest.CaptureFixture[str]) -> None:
    configure("master", "debug", style)
    url = "redis://user:s3cret@host:6379/0"
    event("connected", url=url)
    _log.info("plain text with %s in it", url)
    try:
        raise ValueError(f"cannot reach {url}")
    except ValueError:
        event("failed", exc_info=True)
    told = "\n".join(_lines(capfd))
    assert "s3cret" not in told
    assert told.count(":***@host:6379/0") >= 3


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://:pw@h/0", "redis://:***@h/0"),
        ("unix://:pw@/tmp/redis.sock?db=0", "unix://:***@/tmp/redis.sock?db=0"),
        ("rediss://u:p:w@h", "rediss://u:***@h"),
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("a redis://u:1@h and redis://u:2@h", "a redis://u:***@h and redis://u:***@h"),
        ("redis://:p@ss@h/0", "redis://:***@h/0"),
        ("redis://:p/w@h/0", "redis://:***@h/0"),
        ('{"url":"redis://u:1@h","mail":"x@y"}', '{"url":"redis://u:***@h","mail":"x@y"}'),
        ("http://127.0.0.1:8700/api/health", "http://127.0.0.1:8700/api/health"),
        (
            "redis+sentinel://:a@h:1,i:2/s?sentinel_password=b&x=1",
            "redis+sentinel://:***@h:1,i:2/s?sentinel_password=***&x=1",
        ),
        ("unix:///tmp/s?password=b and more", "unix:///tmp/s?password=*** and more"),
    ],
)
def test_passwords_in_urls(text: str, shown: str) -> None:
    assert redacted(text) == shown


class InHand:
    """Something that a thread is at work on."""

    in_hand = True

    def facts(self) -> dict[str, object]:
        return {"ticket": "42", "attempt": 2}


@pytest.mark.parametrize("style", ["human", "json"])
def test_every_line_tells_what_is_in_hand_whoever_logs_it_and_however(
    style: str, capfd: pytest.CaptureFixture[str]
) -> None:
    configure("c1", "info", style)
    work = InHand()
    token = in_hand.set(work)
    try:
        logging.getLogger("somebody.elses").warning("a plain %s", "line")
        event("ours", attempt=3, more="x")
        work.in_hand = False
        event("later")
    finally:
        in_hand.reset(token)
    plain, ours, later = _lines(capfd)
    if style == "human":
        assert plain.endswith("a plain line ticket=42 attempt=2")
        assert ours.endswith("ours ticket=42 attempt=3 more=x"), "what a line says itself stands"
        assert later.endswith("later")
    else:
        assert [json.loads(line).get("attempt") for line in (plain, ours, later)] == [2, 3, None]


def test_tasks_of_one_loop_have_each_their_own_in_hand(capfd: pytest.CaptureFixture[str]) -> None:
    configure("c1", "info", "json")

    class Numbered(InHand):
        def __init__(self, number: int) -> None:
            self.number = number

        def facts(self) -> dict[str, object]:
            return {"number": self.number}

    async def work(number: int) -> None:
        in_hand.set(Numbered(number))
        await asyncio.sleep(0)
        _log.info(str(number))
        await asyncio.to_thread(_log.info, str(number))

    async def all_of_it() -> None:
        await asyncio.gather(*map(work, range(3)))

    asyncio.run(all_of_it())
    records = [json.loads(line) for line in _lines(capfd)]
    records = [record for record in records if record["logger"] == "tests.log"]
    assert len(records) == 6
    assert all(record["message"] == str(record["number"]) for record in records)


def test_the_level_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    configure("master", "warning", "human")
    event("quiet")
    event("loud", level=WARNING)
    assert len(_lines(capfd)) == 1


@pytest.mark.parametrize("style", ["human", "json"])
def test_secrets_of_the_settings_are_never_logged_in_whatever_form(
    style: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A canary for each, in every place of a line."""
    settings = CommonSettings(
        redis_url="redis://:canary%2Fone@h/0",
        api_token="canary-two",
        dead_letter_webhook="https://hooks.example/canary-three",
    )
    configure("master", "info", style, settings.secrets)
    for hidden in ("canary%2Fone", "canary/one", "canary-two", "https://hooks.example/canary-three"):
        event(f"said_{hidden}", fact=hidden, nested={"token": [hidden]}, raw=hidden.encode())
        try:
            raise ValueError(hidden)
        except ValueError:
            event("failed", exc_info=True)
    _log.info("Authorization: Bearer not-one-of-ours-1234")
    told = "\n".join(_lines(capfd))
    assert "canary" not in told
    assert "1234" not in told
    assert told.count("***") >= 4 * 4


def test_settings_that_are_empty_hide_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    configure("master", "info", "human", CommonSettings().secrets)
    _log.info("abc a bearer of news")
    assert _lines(capfd)[0].endswith("abc a bearer of news")


def test_a_line_of_a_handler_keeps_its_text_and_takes_no_place_of_ours(capfd: pytest.CaptureFixture[str]) -> None:
    configure("consumer", "info", "json")
    _log.info("charged %d", 5, extra={"facts": {"level": "mine", "event": "paid", "amount": 5}})
    (line,) = _lines(capfd)
    document = json.loads(line)
    assert (document["message"], document["level"], document["amount"]) == ("charged 5", "INFO", 5)
