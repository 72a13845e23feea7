"""Find, decorate and call the user's function; the message it is given."""

from __future__ import annotations
