"""The pure parts of HTTP: JSON, models, reports, health URLs."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from usher.common.base.errors import SettingsError
from usher.common.http.app import Problem, answer, parse_json, read_model
from usher.master.membership.consumer_http import UnfitUrl, parse_hosts
from usher.master.web.api import MOST_MESSAGES, read_report


def _refused(call: Any, *arguments: Any) -> Problem:
    with pytest.raises(Problem) as raised:
        call(*arguments)
    return raised.value


# -- JSON


class _Any(TypedDict):
    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # type: ignore[misc]

    a: Any


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"1x", b'"\xff"', b'"\xed\xa0\x80"', rb'"\ud800"', b"{'a': 1}", b"[1,]", b'"\x01"', b"01", b"[" * 2000],
)
def test_what_is_no_json_is_400(text: bytes) -> None:
    assert _refused(parse_json, _Any, b'{"a": %b}' % text).status == 400
    assert _refused(parse_json, _Any, b"\xef\xbb\xbf{}").status == 400


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b' { "a" : [ 1 , 2.5 , null , true ] } ', {"a": [1, 2.5, None, True]}),
        ('"ä\\u00e4😀"'.encode(), "ää😀"),
        (rb'"\ud83d\ude00"', "😀"),
        (b"18446744073709551616", 2**64),
        (rb'"\u0000"', "\0"),
    ],
)
def test_what_is_json_is_read(text: bytes, value: object) -> None:
    assert parse_json(_Any, b'{"a": %b}' % text) == {"a": value}


def test_an_answer_can_hold_what_is_no_utf_8_and_no_64_bits() -> None:
    document = {"id": b"a\xff".decode("utf-8", "surrogateescape"), "big": 2**70}
    assert json.loads(answer(document).get_data()) == document


# -- models


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    size: int = Field(ge=1, le=2**63)
    name: str


def test_all_wrong_fields_are_named_and_no_value_is() -> None:
    problem = _refused(read_model, _Model, {"size": "secret-1", "name": 7_777_777, "secret-2": "secret-3"})
    assert {error["field"] for error in problem.facts["errors"]} == {"size", "name", "(unknown)"}
    told = json.dumps(problem.facts)
    assert "secret" not in told
    assert "7777777" not in told


# -- reports


def _report(**changes: Any) -> dict[str, Any]:
    return {
        "incarnation": "c1:123",
        "tickets": [{"ticket_id": "T", "fence": 5, "message_ids": ["1-0", "2-0"]}],
        **changes,
    }


def _item(**changes: Any) -> dict[str, Any]:
    return _report(tickets=[{"ticket_id": "T", "fence": 5, "message_ids": ["1-0"], **changes}])


@pytest.mark.parametrize(
    "document",
    [
        None,
        {},
        _report(extra=1),
        {"incarnation": "c1:123"},
        *(_report(incarnation=wrong) for wrong in (None, 5, "", "c1:x", "c1:1\n", "c1:\u0661", "a" * 65 + ":1")),
        *(_report(tickets=wrong) for wrong in (None, "T", [None], [{}])),
        *(_item(ticket_id=wrong) for wrong in (None, 5, "", "t" * 257, "ä" * 129)),
        *(_item(fence=wrong) for wrong in (None, True, "5", 5.0, -1, 2**63, 2**64)),
        *(_item(message_ids=wrong) for wrong in (None, [], "1-0", [1], ["1-0", None])),
        *(_item(message_ids=["1-0", wrong]) for wrong in ("", "1-", "1-0\n", "\u0661-0", "1" * 21 + "-0")),
        _item(extra=1),
        _item(message_ids=["1-0"] * (MOST_MESSAGES + 1)),
        _report(tickets=[{"ticket_id": "T", "fence": 5, "message_ids": ["1-0"] * 600}] * 2),
    ],
)
def test_a_report_that_is_not_one_is_422(document: object) -> None:
    assert _refused(read_report, json.dumps(document).encode()).status == 422


@pytest.mark.parametrize(
    "document",
    [
        _item(message_ids=["1-0"] * MOST_MESSAGES),
        _item(message_ids=["9" * 20 + "-" + "9" * 20]),
        _item(ticket_id="t" * 256),
        _item(ticket_id="ä" * 128),
        _item(ticket_id="a\0b/../{x}"),
        _item(fence=0),
        _item(fence=2**63 - 1),
        _report(incarnation="A" + "b" * 63 + ":1795215518421818"),
    ],
)
def test_a_report_at_the_limits_is_read(document: dict[str, Any]) -> None:
    report = read_report(orjson.dumps(document))
    again = read_report(json.dumps(document, indent=1).encode())
    assert (again.incarnation, again.items) == (report.incarnation, report.items)
    told = [
        (item["ticket_id"].encode(), [message_id.encode() for message_id in item["message_ids"]])
        for item in document["tickets"]
    ]
    assert report.items == told


# -- health URLs

_HOSTS = "127.0.0.1,::1, 10.0.0.0/8,0.0.0.0/0,::/0,good,consumer-1.internal"


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1",
        "http://127.0.0.1:8701/api/health",
        "https://10.2.3.4:1/",
        "HTTP://good/".lower(),
        "http://GOOD:65535/x?a=b&c=%20",
        "http://consumer-1.internal:80/api/health",
        "http://[::1]:8701/api/health",
        "http://[0:0:0:0:0:0:0:1]/",
    ],
)
def test_a_plain_url_of_an_allowed_host_is_taken(url: str) -> None:
    parse_hosts(_HOSTS).check(url)


def test_an_address_is_compared_as_an_address_and_a_name_as_a_name() -> None:
    parse_hosts("10.0.0.0/29").check("http://10.0.0.7/")
    parse_hosts("localhost").check("http://localhost/")
    for url, hosts in (
        ("http://10.0.0.8/", "10.0.0.0/29"),
        ("http://127.0.0.1/", "localhost"),
        ("http://127.0.0.1/", ""),
    ):
        with pytest.raises(UnfitUrl):
            parse_hosts(hosts).check(url)


@pytest.mark.parametrize("wrong", ["127.1", "10.0.0.1/8", "a b", "http://good", "good:80", "*", "0x7f.1", "ä"])
def test_an_allow_list_that_cannot_be_read_is_a_settings_error(wrong: str) -> None:
    with pytest.raises(SettingsError, match="USHER_HEALTH_HOSTS"):
        parse_hosts(f"127.0.0.1,{wrong}")


# -- rules of every application


def test_a_report_may_have_no_ticket() -> None:
    """A consumer whose tickets all wait for a retry says only how many they are."""
    report = read_report(b'{"incarnation": "c1:123", "tickets": []}')
    assert (report.incarnation, report.items) == ("c1:123", [])
