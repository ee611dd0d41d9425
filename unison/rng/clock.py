"""The clock of secure noise: a step is used once in a process, never twice."""

import threading

import torch.distributed as dist

from unison.errors import BadInput
from unison.rng.keys import Key, fresh_nonce

_last_steps: dict[tuple[bytes, str], int] = {}
_lock = threading.Lock()


class NoiseClock:
    """Hands out the key of each step, and refuses a step that was used before.

    Two releases under one noise value differ by the data alone: subtracting them removes the noise.
    Loading an old checkpoint would replay its steps, so the record of used steps lives in the
    process, outside anything a checkpoint holds.

    Guarantees:
        For a secret key, no two calls of `advance` in one process get the same (key, purpose,
        step), whichever clock objects make them. For a key from a seed the rule holds for each
        clock object: repeating a run in one process is what such keys are for.

    Args:
        key: Root key of the noise.
        purpose: Names an independent use of the same key, such as "noise" or "sampling".
    """

    def __init__(self, key: Key, purpose: str = "noise") -> None:
        self.purpose = purpose
        self._own: dict[tuple[bytes, str], int] = {}
        self._set_key(key)

    def _set_key(self, key: Key) -> None:
        self._key = key.child("clock", self.purpose)
        self._steps = self._own if key.is_reproducible else _last_steps
        self._id = (self._key.fingerprint(), self.purpose)

    @property
    def last_step(self) -> int | None:
        """The largest step used so far, or None."""
        return self._steps.get(self._id)

    def advance(self, step: int) -> Key:
        """Mark `step` as used and return the key for its streams.

        Raises:
            BadInput: `step` is not above the last one used in this process, or the process is a
                fork of the one that made a secret key.
        """
        self._key.check_process()
        with _lock:
            last = self._steps.get(self._id)
            if last is not None and step <= last:
                raise BadInput(
                    f"{self.purpose} of step {step} was already drawn in this process (last step "
                    f"{last}); drawing it again would let two releases be subtracted. Remedy: go "
                    f"on from step {last + 1}, or call renew() on every rank after loading an "
                    "older state"
                )
            self._steps[self._id] = step
        return self._key

    def renew(self, group: dist.ProcessGroup | None = None) -> None:
        """Mix fresh entropy into the key, so that steps may count from anywhere again.

        A collective: every rank of `group` calls it, and all agree on the entropy. The key is
        secret afterwards, even if it came from a seed, and the run can no longer be repeated.
        """
        key = Key(self._key.derive("renewed", fresh_nonce(group)), is_reproducible=False)
        self._set_key(key)

    def __repr__(self) -> str:
        return f"NoiseClock(purpose={self.purpose!r}, last_step={self.last_step})"
