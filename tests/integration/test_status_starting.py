"""`usher status` while the `usher up` of this machine starts its consumers."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import pytest

from tests.commands import usher
from usher.common.base.clock import wall_ms
from usher.common.redis.locate import LocalInstance, announce_instance


def test_a_consumer_that_has_not_registered_yet_is_starting_until_up_says_that_all_are_there(
    redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    up = LocalInstance(redis_url, "http://m", os.getpid(), "consumer-1", wall_ms() - 3000)
    with mock.patch.dict(os.environ, {"USHER_REDIS_URL": redis_url, "USHER_STATE_DIR": str(tmp_path)}):
        announce_instance(tmp_path, up)
        assert usher("status") == 0
        told = " ".join(capsys.readouterr().out.split())
        assert "consumer-1 of `usher up` is starting, since " in told
        assert "not alive" not in told
        assert usher("status", "--json") == 0
        assert json.loads(capsys.readouterr().out)["starting_since_ms"] == up.starting_since_ms
        announce_instance(tmp_path, LocalInstance(**(asdict(up) | {"starting_since_ms": 0})))
        assert usher("status") == 1
        assert "consumer-1 of `usher up` is not alive" in " ".join(capsys.readouterr().out.split())
