"""`usher rehearse`: a dry run of a handler on existing messages; it changes nothing."""
