"""Deferred initialisation: modules built without memory, filled where they end up."""
