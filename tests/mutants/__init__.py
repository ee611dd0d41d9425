"""Mutants of central lines, each of which a test of `make test` must kill; see `__main__`."""
