"""System A, taken literally: the design that Usher was built from, as a small program, run through the same harness.

It is here so that the harness is seen to fail where it should; nothing of Usher uses it. Kept: ``XREADGROUP`` as
``master`` and ``XCLAIM`` to a consumer, the two maps as JSON strings that are written after it, pings of health URLs
that decide who lives, ``XAUTOCLAIM`` by idle time, ``XREADGROUP ... 0`` and ``XACK`` in the consumer, completion
reported over HTTP. Not there, as in the original: leader election, leases, fences, scripts. Its messages carry no
token, so handlers of it write through a sink that knows uids only.
"""
