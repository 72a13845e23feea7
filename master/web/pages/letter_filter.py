"""Read the page's filter of dead letters: from the query of a list, and from the form of a bulk action."""

from __future__ import annotations

from collections.abc import Mapping

from usher.common.base.labels import label
from usher.common.http.app import read_model
from usher.master.policy.letters import LetterFilter
from usher.master.web.dead_letters import LetterQuery

#: Choices of ``younger_than_s``.
AGES = (("", "any age"), ("900", "15 min"), ("3600", "1 h"), ("21600", "6 h"), ("86400", "1 d"), ("604800", "7 d"))
_NAMES = ("ticket", "reason", "error", "policy", "younger_than_s", "older_than_s")


def asked_filter(given: Mapping[str, str]) -> tuple[dict[str, str], LetterFilter]:
    """Return the texts as they were asked for, and the filter they mean. Raises Problem 422."""
    asked = {name: given.get(name, "") for name in _NAMES}
    return asked, read_model(LetterQuery, {name: value for name, value in asked.items() if value}).meant()


def in_words(asked: Mapping[str, str]) -> str:
    """Return the filter in words."""
    told = {
        "ticket": "of ticket {}",
        "reason": "with the reason {}",
        "error": "with the error {}",
        "policy": "under the policy {}",
    }
    told |= {"younger_than_s": "younger than {} s", "older_than_s": "older than {} s"}
    return (
        ", ".join(
            told[name].format(label(value) if name == "policy" else value) for name, value in asked.items() if value
        )
        or "all dead letters"
    )
