"""Benchmarks: one file per question, one runner that all of them share."""
