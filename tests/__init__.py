"""The test suite; it mirrors `unison/`, and `tests.harness` holds what the tests share.

This file makes `tests` a regular package: a namespace package would lose to any installed
distribution that ships a stray top-level `tests`, and the ranks import test modules by name.
"""
