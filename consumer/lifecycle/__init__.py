"""The life of one consumer process: its name, lease, journal and crash report."""
