SELECT stream, id FROM ids WHERE starts > 1 OR most > 1
