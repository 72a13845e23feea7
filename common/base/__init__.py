"""Errors, clock, log and text: the ground floor, which imports no other part of Usher."""
