"""The HTTP client for the masters: it asks the leader first, the others when the leader cannot be reached. One thread
at a time has it: who registers, then who reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from usher.common.base.clock import now_s
from usher.common.base.errors import RedisTrouble
from usher.common.base.extras import Late
from usher.common.protocol.registration import WINDOW_HEADER

urllib3: Any = Late("urllib3")

_CONNECT_S, _READ_S = 1.0, 5.0


class MasterUnavailable(RedisTrouble):
    """No master can be reached, or none leads."""


class MasterAnswer(NamedTuple):
    """The answer of a master. ``document`` is empty when it was not a JSON object, ``sent_s`` the time at which this
    very request left, ``window`` how many messages the leader gives us at a time."""

    url: str
    status: int
    document: Mapping[str, Any]
    sent_s: float
    window: int | None = None


class MasterClient:
    """A client that posts JSON to whichever master answers. The API promises that every call is safe to repeat, so the
    next master may be asked.

    It is urllib3, not requests on top of it, which would double the cost of a report under load. It looks for no proxy
    and no .netrc.
    """

    def __init__(self, urls: Sequence[str], token: str, ca: Path | None = None) -> None:
        """Make a client. ``ca``: a file of the trusted CAs; None: those of the system."""
        self._urls = deque(url.strip().rstrip("/") for url in urls)
        timeout, of_ca = urllib3.Timeout(connect=_CONNECT_S, read=_READ_S), None if ca is None else str(ca.expanduser())
        self._http = urllib3.PoolManager(timeout=timeout, retries=False, ca_certs=of_ca)
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    @property
    def longest_s(self) -> float:
        """Return the longest time in seconds that ``post`` takes when no master answers."""
        return (len(self._urls) + 1) * (_CONNECT_S + _READ_S)

    def prefer(self, url: str) -> bool:
        """Ask the master at ``url`` first from now on. Return False when it is not one of ours."""
        if url not in self._urls:
            return False
        self._urls.remove(url)
        self._urls.appendleft(url)
        return True

    def post(self, path: str, body: bytes, headers: Mapping[str, str] = MappingProxyType({})) -> MasterAnswer:
        """Post ``body`` (JSON) and return the first answer that is not "ask another master" (503). Raises
        MasterUnavailable when there is none."""
        problems = []
        for _ in range(len(self._urls) + 1):
            url = self._urls[0]
            sent_s = now_s()
            try:
                response = self._http.urlopen(
                    "POST", url + path, body=body, headers={**self._headers, **headers}, redirect=False
                )
            except urllib3.exceptions.HTTPError as problem:
                problems.append(f"{url}: {type(problem).__name__}")
                self._urls.rotate(-1)
                continue
            window = response.headers.get(WINDOW_HEADER, "")
            answer = MasterAnswer(
                url,
                response.status,
                _document(response.data),
                sent_s,
                int(window) if window.isascii() and window.isdecimal() and len(window) < 10 else None,
            )
            if answer.status != 503:
                return answer
            told = [str(answer.document[part]) for part in ("title", "detail") if answer.document.get(part)]
            problems.append(f"{url}: {': '.join(told) or 503}")
            leader = answer.document.get("leader_url")
            if leader == url or not (isinstance(leader, str) and self.prefer(leader)):
                self._urls.rotate(-1)
        raise MasterUnavailable("; ".join(problems))

    def close(self) -> None:
        self._http.clear()


def refusal(document: Mapping[str, Any]) -> str:
    told = str(document.get("detail") or document.get("title") or "")
    errors = document.get("errors")
    named = [one for one in errors if isinstance(one, dict)] if isinstance(errors, list) else []
    fields = "; ".join(f"{one.get('field')}: {one.get('problem')}" for one in named)
    return f"{told}: {fields}" if told and fields else told or fields


def _document(body: bytes) -> Mapping[str, Any]:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}
