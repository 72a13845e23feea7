"""What goes wrong. Every injector counts what it did, so that a run can show that it was hit."""
