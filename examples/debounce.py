"""Update a search index once per document after a burst of changes: the last change is what is indexed.

::

    usher run examples.debounce:index
    usher send --ticket doc-1 text="first draft"; usher send --ticket doc-1 text="second draft"
"""

from __future__ import annotations

import logging

from usher import Message, handler

log = logging.getLogger(__name__)
indexed: dict[str, tuple[str, int]] = {}


@handler(settle_s=0.5, settle_max_s=5)
def index(message: Message) -> None:
    """Index a document when nothing has changed it for half a second, at the latest five seconds after the first
    change."""
    changes = [message, *message.absorb()]  # in order: the last one is the document as it is now
    indexed[message.ticket_id] = changes[-1].fields["text"], len(changes)
    log.info("%s is indexed, after %d changes", message.ticket_id, len(changes))
