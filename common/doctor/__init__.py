"""The doctor: judges whether the promise holds on this Redis, as it is set up and as it is now.

``collector`` asks, and judges the ticket stream; ``judgements`` makes findings of what it was told of the server. What
Redis refuses to tell is unknown, and never fine."""
