"""Recover after a change of leader or the death of a consumer."""
