"""`python -m unison`, for `torchrun -m unison train ...`."""

from unison.cli import main

if __name__ == "__main__":
    main()
