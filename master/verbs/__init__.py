"""What operators do: one registry of verbs, of which routes, commands, forms, previews and bulk jobs are made."""
