"""`unison` whose steps take seconds while a file is there: time for nodes to come and go.

The file is named by UNISON_TEST_HOLD. `python -m tests.chaos.slow_rank train ...`
"""

import os
import time
from pathlib import Path

from unison.cli import main
from unison.train import loop

QUICK_STEPS = 15

original = loop.train_step


def train_step(*args, step: int, **kwargs):
    if step > QUICK_STEPS and Path(os.environ["UNISON_TEST_HOLD"]).exists():
        time.sleep(2.0)
    return original(*args, step=step, **kwargs)


if __name__ == "__main__":
    loop.train_step = train_step  # type: ignore[assignment]
    main()
