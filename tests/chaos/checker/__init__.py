"""The checker: a history in, violations out.

It is kept apart from what it judges: standard library only, nothing of the project imported (``test_checker.py``
looks), and it reads only what test code wrote: producer, handlers, sink, stream tail and fault injector. One host, one
clock (nanoseconds that never go back and count suspend). ``python -m tests.chaos.checker HISTORY`` judges a file again.

Records, one JSON object per line, ``k`` says which
----------------------------------------------------
::

    terms     what holds in this run: {strict, max_attempts, drain_ns, must: [...], tokens}
    send      producer: {uid, ticket, r: ok|info|fail, t0, t1, expect: effect|dlq|either, amount}
    stream    plain XREAD tail: {mid, uid, ticket, t}
    start     handler, before any effect: {x, uid, ticket, tok, who, mid, attempt, t, kind (of the handler,
              if told), owner (the process that has the ticket, if it is another one)}
    skip      batch handler: a message that it was given and did not start, behind a failed one: {uid, who}
    finish    handler, after it: {x, ok, t}
    die       fault injector or restarter: {who, t}
    commit    rows of the sink in commit order: {n, uid, ticket, tok, who, t}
    fenced    a handler whose effect the sink refused: {x, ticket, tok, who, t}
    dlq       dead letters at the end: {uid, mid, attempts, reason}
    fault     {kind, t0, t1, who, recover: tickets|service|"", since, bound_ns}
    stall     a process that was not scheduled for a while: {who, t0, t1}
    lost      messages that an injected loss of data took: {uids, why}
    deleted   entries that an injected XDEL, XTRIM or FLUSHALL took: {uids, why}
    counters  what happened, as counted by the rig
    final     the state at quiescence: {pel, lag, tickets, attempts, members, live, keys, quiet_ns, accounts, held}
"""
