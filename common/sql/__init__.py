"""Connect to SQL databases, and tell which of their errors pass by themselves."""
