"""What the tests of the guard share."""

TIMEOUT = 4.0  # seconds that a guard waits for slow ranks
