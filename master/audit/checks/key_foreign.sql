-- bad: Keys of Usher have the type and the form that Usher gives them.
-- means: Another program wrote to it: masters and consumers cannot work with it. The stream was not audited.
-- repair: Find the program that writes there, and restore the key from a copy, or delete it (deploy/runbook.md).
SELECT stream, '' AS id, '' AS ticket, '' AS owner, detail FROM foreign_keys
