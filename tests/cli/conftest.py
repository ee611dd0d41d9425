"""What the tests of the command line share."""

import sys

import pytest

from unison.cli import main


@pytest.fixture
def unison(monkeypatch, capsys):
    """Run the command line in this process; returns exit code, standard output and error."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["unison", *map(str, args)])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return left.value.code or 0, out, err

    return run
