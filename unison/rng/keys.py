"""Keys: 32 secret bytes, and what may be done with them.

Everything random in unison hangs on a root key. A key made from entropy is secret: it never shows
in a repr, cannot be copied, pickled or saved, and dies with its process; a fork may not use it,
since both would draw the same noise. A key made from a seed is for experiments that must be
repeated; it says so, and nothing private may rest on it.

`NoiseClock` hands out the keys of secure noise: a step is used once in a process, never twice.
"""

import hashlib
import hmac
import os
import threading
from typing import NoReturn

import torch
import torch.distributed as dist

from unison.errors import BadInput

KEY_BYTES = 32
FROM_SYSTEM, FROM_SEED = "operating system", "seed"  # where a key may come from
_PERSON = b"unison.rng.v1"  # domain of the hash; at most 16 bytes


class Key:
    """A root key of 256 bits. Make one with `from_entropy`, `from_seed` or `shared`.

    Guarantees:
        `repr`, `str` and error messages never hold the bytes. Copying, pickling and `torch.save`
        raise `TypeError`, so a key cannot slip into a checkpoint. Comparison takes the same time
        wherever two keys differ. A secret key is of use in the process that made it, and raises
        in its forks.
    """

    __slots__ = ("_bytes", "_is_reproducible", "_process")

    def __init__(self, secret: bytes, *, is_reproducible: bool) -> None:
        if len(secret) != KEY_BYTES:
            raise BadInput(f"expected a key of {KEY_BYTES} bytes, found {len(secret)}")
        self._bytes = bytes(secret)
        self._is_reproducible = is_reproducible
        self._process = os.getpid()

    @classmethod
    def from_entropy(cls) -> "Key":
        """Return a fresh secret key from the operating system."""
        return cls(os.urandom(KEY_BYTES), is_reproducible=False)

    @classmethod
    def from_seed(cls, seed: int) -> "Key":
        """Return the key of a seed: the same everywhere, and therefore not secret.

        >>> Key.from_seed(1) == Key.from_seed(1), Key.from_seed(1) == Key.from_seed(2)
        (True, False)
        """
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise BadInput(f"expected an integer seed, found {seed!r}")
        digest = _hash(b"\0" * KEY_BYTES, b"seed", str(seed).encode(), size=KEY_BYTES)
        return cls(digest, is_reproducible=True)

    @classmethod
    def shared(cls, group: dist.ProcessGroup | None = None) -> "Key":
        """Return one fresh secret key on every rank of `group`, drawn on its first rank.

        Every rank of the group must call it: it is a collective. Without an initialised process
        group it is `from_entropy`.
        """
        return cls.from_entropy().agree(group)

    @property
    def is_reproducible(self) -> bool:
        """Return whether the key comes from a seed, so that anyone can make it again."""
        return self._is_reproducible

    @property
    def origin(self) -> str:
        """Where the key comes from: `"operating system"`, or `"seed"`.

        >>> Key.from_seed(1).child("noise").origin, Key.from_entropy().origin
        ('seed', 'operating system')
        """
        return FROM_SEED if self._is_reproducible else FROM_SYSTEM

    def agree(self, group: dist.ProcessGroup | None = None) -> "Key":
        """Return the key that the group's first rank holds, on every rank (a collective).

        The bytes travel over the group's own backend, as the gradients do.
        """
        self.check_process()
        return Key(_broadcast(self._bytes, group), is_reproducible=self._is_reproducible)

    def check_process(self) -> None:
        """Make sure that a secret key is used where it was made, and in no fork of that process.

        Forks hold the same bytes and count the same steps: they would draw the same noise, and the
        difference of what they release would have none.

        Raises:
            BadInput: In a fork.
        """
        if not self._is_reproducible and os.getpid() != self._process:
            raise BadInput(
                f"a secret key of process {self._process} was used in process {os.getpid()}, a "
                "fork of it, which would draw the same noise a second time. Call make_private (or "
                "make the key) in the process that trains, after the fork"
            )

    def derive(self, *parts: str | int | bytes, size: int = KEY_BYTES) -> bytes:
        """Return `size` bytes that depend on the key and on every part, by keyed BLAKE2b.

        Parts are length-prefixed and typed before they are hashed, so no two lists collide:

        >>> key = Key.from_seed(0)
        >>> key.derive("ab", "c") == key.derive("a", "bc")
        False
        """
        self.check_process()
        return _hash(self._bytes, *(_encode(part) for part in parts), size=size)

    def child(self, *parts: str | int | bytes) -> "Key":
        """Return a key derived from this one, for another purpose."""
        return Key(self.derive("child", *parts), is_reproducible=self._is_reproducible)

    def fingerprint(self) -> bytes:
        """Return 16 bytes that tell keys apart and reveal nothing else about them."""
        return self.derive("fingerprint", size=16)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Key):
            return NotImplemented
        same_kind = self._is_reproducible == other._is_reproducible
        return hmac.compare_digest(self._bytes, other._bytes) and same_kind

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def __repr__(self) -> str:
        origin = "seed, not secret" if self._is_reproducible else "entropy"
        return f"Key(from {origin}; bytes withheld)"

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(
            "a Key cannot be copied, pickled or saved: a stored key would let whoever reads the "
            "file subtract the noise. Pass the key object itself; after a restart make a new one "
            "with Key.from_entropy() or Key.shared(), or use Key.from_seed(seed) and store the seed"
        )

    __copy__ = __deepcopy__ = __getstate__ = __reduce__ = __reduce_ex__ = _refuse  # type: ignore[assignment]


def _broadcast(secret: bytes, group: dist.ProcessGroup | None) -> bytes:
    if not (dist.is_available() and dist.is_initialized()):
        return secret
    if dist.get_backend(group) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        device = torch.device("cpu")
    buffer = torch.tensor(list(secret), dtype=torch.uint8, device=device)
    dist.broadcast(buffer, src=dist.get_global_rank(group, 0) if group else 0, group=group)
    agreed = bytes(buffer.tolist())
    buffer.zero_()
    return agreed


def _encode(part: str | int | bytes) -> bytes:
    if isinstance(part, bytes):
        return b"b" + part
    if isinstance(part, str):
        return b"s" + part.encode()
    if isinstance(part, int):
        return b"i" + str(int(part)).encode()
    raise BadInput(f"expected a name, number or bytes, found {part!r}")


def _hash(secret: bytes, *parts: bytes, size: int) -> bytes:
    digest = hashlib.blake2b(key=secret, digest_size=size, person=_PERSON)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


# --- the clock of secure noise --------------------------------------------------------------------

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
        secret = self._key.derive("renewed", _broadcast(os.urandom(16), group))
        self._set_key(Key(secret, is_reproducible=False))

    def __repr__(self) -> str:
        return f"NoiseClock(purpose={self.purpose!r}, last_step={self.last_step})"
