"""Runs whose ranks are killed, and nodes that come and go; see `runs` and `__main__`."""
