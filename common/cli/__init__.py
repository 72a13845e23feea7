"""The commands of ``usher`` that belong to neither program: send, doctor, acl, token. ``usher.cli`` imports each when
it is called."""
