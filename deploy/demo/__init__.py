"""The demo's handler, its records, and the judge of these records.

The handler knows nothing of leases, fences or acknowledgements and does not report: it writes a line when it starts and
a line when it ends, to a file of its own process. ``verdict.judge`` compares these lines with the list of sent
messages. Neither looks at Usher's own state, so the verdict cannot be fooled by the system that it judges.
"""
