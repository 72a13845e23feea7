"""Messages as people see them: fields of them in lists, and a search by a field."""
