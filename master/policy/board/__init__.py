"""Plan the leader's hand-overs: tickets, their owners, live rules. Pure."""
