"""The handler of `usher demo`, and the judge of what it did."""
