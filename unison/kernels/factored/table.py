"""The table of layers that `triton.py` reads: a row for each, all int64."""

LEFT, RIGHT, OUT = 0, 8, 16
"""Columns: of each side its address and what follows, and the address of the sum."""
SAMPLE, TOKEN, FEATURES = 1, 2, 3
"""After a side's address: strides of a sample and of a token, and how many features it has."""
RUN, LEAST = 4, 5
"""Then steps of a run of features, and what is added to a token's norm, as the bits of float64."""
WIDTH = 24
