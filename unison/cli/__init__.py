"""The command line `unison`."""

from unison.cli.app import main, run
