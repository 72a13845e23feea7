"""Plain consumer groups without tickets: ReliableStream and MessageReadingLoop (public library)."""
