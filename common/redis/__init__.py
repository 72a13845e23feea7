"""Connect to Redis: connections, errors, scripts, and the embedded server."""
