"""The command line `unison`: one file per verb."""

from unison.cli.app import main

__all__ = ["main"]
