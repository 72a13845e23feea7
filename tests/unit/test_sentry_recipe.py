"""The recipe for Sentry in docs/handlers.md, run as it stands there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import sentry_sdk

from tests.rules import ROOT
from usher import GiveUp, RetryLater
from usher.consumer.handlers.loader import handler_of
from usher.testing import message


def test_sentry_is_told_of_errors_with_their_ticket() -> None:
    told: list[Any] = []
    document = (ROOT / "docs" / "handlers.md").read_text()
    [recipe] = [block for block in re.findall(r"```python\n(.*?)```", document, re.DOTALL) if "sentry_sdk" in block]
    module: dict[str, Any] = {}
    exec(recipe, module)  # noqa: S102 - our own document
    raises: list[BaseException | None] = [KeyError("price"), RetryLater(3), None, GiveUp("no")]

    @module["around"](module["to_sentry"])
    def handle(one: Any) -> None:
        if (problem := raises.pop(0)) is not None:
            raise problem

    call = handler_of(handle).call
    sentry_sdk.init(
        "https://key@127.0.0.1:9/1", before_send=lambda event, hint: told.append(event), default_integrations=False
    )
    try:
        with pytest.raises(KeyError):
            call(message("42", attempt=2))
        with pytest.raises(RetryLater):
            call(message("42"))
        call(message("42"))
        with pytest.raises(GiveUp):
            call(message("7"))
    finally:
        sentry_sdk.get_client().close(timeout=0)
        sentry_sdk.init()
    assert [(event["exception"]["values"][-1]["type"], event["tags"]["ticket"]) for event in told] == [
        ("KeyError", "42"),
        ("GiveUp", "7"),
    ]
    assert told[0]["contexts"]["message"]["attempt"] == 2
