"""Ask the masters over HTTP whether they and the consumers are well."""

from __future__ import annotations

from typing import Any, NamedTuple

import requests

_CONNECT_S, _TIMEOUT_S = 1.0, 2.0


class ProbeAnswer(NamedTuple):
    """The answer of a master. ``status`` 0: no answer, and ``reason`` says why; else the HTTP status and the JSON
    document (None if it was none)."""

    status: int
    document: Any = None
    reason: str = ""


def ask(url: str, token: str = "", ca: str | bool = True, timeout_s: float = _TIMEOUT_S) -> ProbeAnswer:
    """GET a URL of a master; never raises. ``ca``: a file of certificates that are trusted, in place of the system's;
    ``timeout_s``: for the answer."""
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        with requests.Session() as asking:
            asking.trust_env, asking.verify = False, ca  # our own addresses: no proxy
            answer = asking.get(url, headers=headers, timeout=(_CONNECT_S, timeout_s), allow_redirects=False)
            return ProbeAnswer(answer.status_code, answer.json() if "json" in answer.headers["Content-Type"] else None)
    except (OSError, ValueError, KeyError) as failed:  # those of requests are OSError; or it is none of ours
        return ProbeAnswer(0, None, str(failed))


def is_well(url: str, token: str = "") -> tuple[bool, str]:
    answer = ask(f"{url}/api/health", token)
    if answer.status == 200:
        return True, ""
    document = answer.document if isinstance(answer.document, dict) else {}
    told = document.get("reasons") or [document.get("detail") or document.get("title") or "no reason given"]
    return False, answer.reason or f"HTTP {answer.status}: {'; '.join(map(str, told))}"


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
