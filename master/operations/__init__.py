"""Do what operators and timers ask for. Needs no leader, except for the delayed sender."""
