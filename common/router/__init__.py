"""Read any number of streams on a handful of connections (public library)."""
