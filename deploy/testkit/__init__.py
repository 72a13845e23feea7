"""Tests of users: messages for unit tests, and master and consumer moved step by step in one process
(``usher.testing``)."""
