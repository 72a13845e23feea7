"""Lines of gunicorn about the ends of its workers, in the forms that its versions give them."""

from __future__ import annotations

import logging

import pytest

from usher.common.http.server.server_log import NEVER_AGAIN, ServerLog

_FORMS = pytest.mark.parametrize("is_whole", [True, False], ids=["gunicorn 25.1 to 26.0", "later"])


def _said(log: ServerLog, level: str, message: str, *args: object, is_whole: bool) -> None:
    getattr(log, level)(*([message % args] if is_whole else [message, *args]))


@_FORMS
def test_a_line_of_a_worker_that_stood_still_is_not_told_twice_and_one_of_another_is(
    caplog: pytest.LogCaptureFixture, is_whole: bool
) -> None:
    log = ServerLog(None)
    log.critical("WORKER TIMEOUT (pid:%s)", 7)
    with caplog.at_level(logging.DEBUG):
        for pid in (7, 77):
            _said(log, "warning", "Worker (pid:%s) was sent %s!", pid, "SIGABRT", is_whole=is_whole)
    assert [record.levelname for record in caplog.records] == ["DEBUG", "WARNING"]


@_FORMS
def test_a_worker_that_was_killed_is_known(is_whole: bool) -> None:
    log = ServerLog(None)
    _said(log, "error", "Worker (pid:%s) was sent %s! Perhaps out of memory?", 7, "SIGKILL", is_whole=is_whole)
    assert log.killed == 7
    _said(log, "error", "Worker (pid:%s) was sent %s!", 8, "SIGSEGV", is_whole=is_whole)
    assert log.killed == 7


@_FORMS
def test_the_code_of_a_worker_that_could_not_start_is_not_told_and_another_is(
    caplog: pytest.LogCaptureFixture, is_whole: bool
) -> None:
    log = ServerLog(None)
    with caplog.at_level(logging.DEBUG):
        for code in (*NEVER_AGAIN, 1):
            _said(log, "error", "Worker (pid:%s) exited with code %s.", 7, code, is_whole=is_whole)
    assert [record.levelname for record in caplog.records] == ["DEBUG", "DEBUG", "ERROR"]
