"""Squared norms from inner products of tokens."""
