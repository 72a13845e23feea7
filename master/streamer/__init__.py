"""The third program: moves committed outbox rows into the stream."""
