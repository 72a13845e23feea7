"""The demo's handler, what it writes down, and the judge of what it wrote.

The handler knows nothing of leases, fences or acknowledgements and reports to nobody: it writes a line when it starts
and a line when it ends, to a file of its own process. ``verdict.judge`` compares these lines with the list of what was
sent. Neither looks at Usher's own state, so the verdict cannot be fooled by the thing it judges.
"""
