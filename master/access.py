"""Who may ask a master, and under which names: from its settings."""

from __future__ import annotations

from urllib.parse import urlsplit

from common.credentials import Credentials, Identity, Role, fixed_tokens
from common.settings import is_loopback
from master.settings import MasterSettings

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def master_credentials(settings: MasterSettings) -> Credentials:
    """The tokens that a master takes. Raises SettingsError."""
    fixed = fixed_tokens(
        {
            "USHER_API_TOKEN": (settings.api_token, Identity(Role.ALL, "api-token")),
            "USHER_OPERATOR_TOKEN": (settings.operator_token, Identity(Role.OPERATOR, "operator-token")),
            "USHER_VIEWER_TOKEN": (settings.viewer_token, Identity(Role.VIEWER, "viewer-token")),
        }
    )
    return Credentials(fixed, None if settings.tokens_file is None else settings.tokens_file.expanduser())


def hosts_of(settings: MasterSettings) -> tuple[str, ...]:
    """The names that a request may be addressed to; empty: any.

    A page of somewhere else can make its own name lead to 127.0.0.1 (DNS rebinding). Where a token is asked for that is of no use to it.
    """
    named = tuple(host.strip().strip("[]") for host in settings.hosts.split(",") if host.strip())
    own = (settings.bind.rpartition(":")[0].strip("[]"), urlsplit(settings.advertise_url).hostname or "")
    if named:
        return named
    asked = any((settings.api_token, settings.operator_token, settings.viewer_token, settings.tokens_file))
    return () if asked or not is_loopback(settings.bind) else tuple(filter(None, (*_LOCAL_NAMES, *own)))
