"""Commands of the consumer's side."""
