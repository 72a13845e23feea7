"""Keys, ids, messages and records: the data stored in Redis and sent between the programs. Pure."""
