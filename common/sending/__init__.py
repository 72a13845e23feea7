"""Add messages: the producer library, and helpers of the commands that send."""
