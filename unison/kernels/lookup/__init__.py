"""Rows of tables that samples look up: added, squared and weighted."""
