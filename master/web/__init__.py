"""The master's HTTP interface. ``usher.master.assembly.web_app`` puts its parts together.

=======================  ===============================================================================================
module                   content
=======================  ===============================================================================================
ports                    the requirements of the interface on the running master
adapter                  the running master as ``ports`` wants it
api                      routes for consumers, tickets, sources and the last audit
dead_letters             routes of the dead letters
operations               routes of explain, rules, drain and the action log
operations_adapter       the running master as ``operations`` wants it
follow                   the events of a ticket
documents                the documents that the routes answer, for the OpenAPI document
pages                    the web page
=======================  ===============================================================================================

===================================  ===================================================================================
request                              answer
===================================  ===================================================================================
POST /api/consumers/register         201 new, 200 the same incarnation again, 409 ``name_in_use``, 410
                                     ``registration_over``
POST /api/consumers/deregister       200, 404 ``unknown_incarnation``
POST /api/messages/acknowledge       200 with ``ok``, ``gone`` or ``stale`` per message, 409 ``fenced``, 503
                                     ``not_leader``
GET /api/consumers                   200
GET /api/sources                     200, the progress of gathering; null when there is one ticket stream
GET /api/tickets?cursor=&limit=      200, a page of at most 200
GET /api/tickets?id=                 200, that one or none
GET /api/tickets/{id}                200, 404 ``unknown_ticket``
GET /api/dead-letters?ticket=&...    200, a page of at most 200, oldest first; ``cursor``: where the next page begins
GET /api/dead-letters/{id}           200 with traceback and fields, 404 ``unknown_dead_letter``
POST /api/dead-letters/redrive       200 with an outcome per letter; a body of ``ids``, or of ``filter`` and ``limit``
POST /api/dead-letters/drop          the same
GET /api/audit                       200, the summary of the last audit in ``audit``; null when there was none
GET /api/lag                         200, plain numbers for autoscalers: ``lag``, ``unfinished`` and the like
GET /api/tickets/{id}/explain        200, always: an unknown ticket is explained too
GET /api/explain?id=                 the same, for any id: in a path, ``x/explain`` or ``..`` may be taken for something
                                     else
GET /api/events?id=                  200, server-sent events of a ticket; GET /api/tickets/{id}/events is the same
GET /api/rules                       200
POST /api/rules                      201 set, 200 replaced the rule for that target, 409 ``too_many_rules``
DELETE /api/rules/{id}?reason=       200, 404 ``unknown_rule``
POST /api/consumers/{name}/drain     200, 404 ``unknown_consumer``; a body ``{"reason": "..."}``, which may be ``{}``
POST /api/consumers/{name}/resume    200, 404 ``not_drained``; the same body
GET /api/actions?cursor=&limit=      200, a page of at most 500, newest first; ``cursor``: where the next page begins
GET /, /tickets, /consumers, ...     the page (``usher.master.web.pages``): its errors are pages too; POST of its forms:
                                     303
GET /live/overview, /live/consumers  server-sent events of the page
GET /api/openapi.json                200, this table for programs, made from the routes (``usher.common.http.openapi``)
GET /metrics                         200, for Prometheus
GET /api/health, /ready, /live       200, 503 with the reasons; ``ready`` is 503 during a stop too; ``live`` is always
                                     200
===================================  ===================================================================================

Any request: 400, 401, 403, 404, 405, 406, 408, 411, 413, 414, 415, 421, 422, 429, 431 for the client's mistakes, 503
with Retry-After when Redis is away; bodies of errors are problem documents (``usher.common.http.app``).
"""

from __future__ import annotations
