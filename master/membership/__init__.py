"""Know which consumers there are, and whether they live."""
