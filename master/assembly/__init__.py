"""Put a master together: the composition root."""
