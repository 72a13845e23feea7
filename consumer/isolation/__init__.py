"""Child processes that run the handler only: for suspects of a crash (quarantine.py), and for `usher rehearse`."""
