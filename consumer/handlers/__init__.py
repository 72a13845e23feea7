"""The user's function: find it, decorate it, call it; and the message that it is given."""
