"""Charts: the leader writes a point a minute into Redis, and any master shows the last hour, day or week of them."""
