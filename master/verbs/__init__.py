"""Registry of the operators' verbs, of which routes, commands, forms, previews and bulk jobs are made."""
