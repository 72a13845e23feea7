"""Commands that look at a running system. They read Redis and need no master."""
