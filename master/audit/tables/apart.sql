SELECT p.* FROM entries p SEMI JOIN unlike u ON u.nth = p.nth AND u.stream = p.stream WHERE p.consumer IS NOT NULL
