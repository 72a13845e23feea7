"""The rig: real processes, and the history of what they did."""
