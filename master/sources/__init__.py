"""Gather many ticket streams into one work stream."""
