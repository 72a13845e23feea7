"""The master's HTTP interface. ``usher.master.assembly.program`` puts its parts together.

==============  ====================================================================================================
module          content
==============  ====================================================================================================
parts           the running master, as the interface sees it
api             routes for consumers, tickets and their events, sources and the last audit
dead_letters    routes of the dead letters
delayed         routes of the delayed messages
messages        routes of one message, and of the search by a field
operations      routes of explain, rules, drain, orders and the action log
documents       the documents that the routes answer, for the OpenAPI document
pages           the web page
==============  ====================================================================================================

``python docs/reference.py http`` tells all routes, from their ``@tells``; ``GET /api/openapi.json`` does it for
programs. Beside them: ``GET /, /tickets, ...``, the page (``usher.master.web.pages``), whose errors are pages too, and
``GET /live/...``, its server-sent events.

Any request: 400, 401, 403, 404, 405, 406, 408, 411, 413, 414, 415, 421, 422, 429, 431 for the client's mistakes, 503
with Retry-After when Redis is away; bodies of errors are problem documents (``usher.common.http.app``).
"""

from __future__ import annotations
