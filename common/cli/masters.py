"""Ask the masters over HTTP whether they and the consumers are well."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

import orjson

_TIMEOUT_S = 2.0
#: Use no proxy, whatever the environment says: these are this machine's own addresses.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class ProbeAnswer:
    """The answer of a master. ``status`` 0: no answer, and ``reason`` says why; else the HTTP status and the JSON
    document (None if it was none)."""

    status: int
    document: Any = None
    reason: str = ""


def ask(url: str, token: str = "") -> ProbeAnswer:
    """GET a URL of a master; never raises."""
    request = urllib.request.Request(url, headers={"Accept": "application/json"})
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with _OPENER.open(request, timeout=_TIMEOUT_S) as reply:
            return ProbeAnswer(reply.status, _json(reply.read()))
    except urllib.error.HTTPError as refused:
        with refused:
            return ProbeAnswer(refused.code, _json(refused.read()))
    except (OSError, ValueError) as failed:
        return ProbeAnswer(0, None, str(failed))
    except http.client.HTTPException as unreadable:
        return ProbeAnswer(
            0,
            None,
            f"what listens there does not speak HTTP ({type(unreadable).__name__}): another server has that port",
        )


def is_well(url: str, token: str = "") -> tuple[bool, str]:
    answer = ask(f"{url}/api/health", token)
    if answer.status == 200:
        return True, ""
    return False, answer.reason or f"HTTP {answer.status}: {_reasons(answer.document)}"


def somebody_leads(urls: list[str], token: str = "") -> bool:
    answers = (ask(f"{url}/api/health", token) for url in urls)
    return any(isinstance(answer.document, dict) and answer.document.get("leader") is True for answer in answers)


def living_consumers(urls: list[str], token: str = "") -> set[str]:
    for url in urls:
        answer = ask(f"{url}/api/consumers", token)
        if answer.status == 200:
            rows = answer.document.get("consumers", []) if isinstance(answer.document, dict) else []
            return {str(row["name"]) for row in rows if row.get("state") in ("live", "paused")}
    return set()


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def _reasons(document: Any) -> str:
    if not isinstance(document, dict):
        return "no reason given"
    told = document.get("reasons") or document.get("detail") or document.get("title") or "no reason given"
    return "; ".join(map(str, told)) if isinstance(told, list) else str(told)
