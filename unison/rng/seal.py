"""A secret key that its owner keeps: sealed in a file under a passphrase.

Without this nothing of a secret key is ever written, and it dies with its process. The file holds
the key, a random salt and a hash of the data that it is for, encrypted by ChaCha20-Poly1305 under
what scrypt makes of the passphrase; the cost of scrypt is a part of the format, so that a file
cannot ask for more. Whoever opens it can take the noise off everything that the run released.
"""

import hashlib
import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unison.errors import BadInput
from unison.rng.streams import KEY_BYTES, Key
from unison.schema import build, read_bytes, read_json, short

FORMAT = "unison-sealed-key/1"
PASSPHRASE = "UNISON_PASSPHRASE"  # the environment variable that may hold it
LEAST_CHARACTERS = 8
_SCRYPT = {"n": 1 << 17, "r": 8, "p": 1}  # 128 MiB and half a second for each guess


@dataclass(frozen=True, kw_only=True)
class _SealedKey:
    """What the file holds, in hexadecimal: scrypt's salt, and the cipher's nonce and output."""

    format: str
    salt: str
    nonce: str
    sealed: str

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise BadInput(f"expected format {FORMAT}, found {short(self.format)}")
        lengths = {"salt": 16, "nonce": 12, "sealed": 3 * KEY_BYTES + 16}
        for name, length in lengths.items():
            text = getattr(self, name)
            if len(text) != 2 * length or set(text) - set("0123456789abcdef"):
                raise BadInput(f"{name} must be {length} bytes in hexadecimal, found {short(text)}")


def seal_key(key: Key, path: Path, passphrase: str, data: str) -> str:
    """Write a key to a new file that only its owner may read, and that the passphrase opens.

    Args:
        key: The key.
        path: The file.
        passphrase: What opens it.
        data: A SHA-256 of the data that is trained on, in hexadecimal.

    Returns:
        The commitment to the key: a hash under a salt, which lies in the file.

    Raises:
        BadInput: If the file exists or cannot be written.
    """
    salt, own, nonce = os.urandom(KEY_BYTES), os.urandom(16), os.urandom(12)
    secret = key._bytes + salt + bytes.fromhex(data)
    sealed = _cipher(passphrase, own).encrypt(nonce, secret, FORMAT.encode())
    content = _SealedKey(format=FORMAT, salt=own.hex(), nonce=nonce.hex(), sealed=sealed.hex())
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(path, flags, 0o600), "w") as file:
            file.write(json.dumps(asdict(content), indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise BadInput(
            f"{path} exists, and may be the sealed key of another run: name a new file, or go on "
            "with that run by --resume"
        ) from None
    except (OSError, ValueError) as error:
        raise BadInput(f"the sealed key {path} cannot be written: {error}") from None
    return commitment(key, salt)


def open_sealed_key(
    path: Path, passphrase: str, data: str, *, is_reproducible: bool = False
) -> tuple[Key, str]:
    """Return the key in a file, and the commitment to it.

    Args:
        path: The file.
        passphrase: What it was sealed under.
        data: A SHA-256 of the data, which must be what it was sealed for: the same noise on other
            data gives away where they differ.
        is_reproducible: Whether steps may be drawn again under it: to check a run, and for nothing
            that is released.

    Raises:
        BadInput: If it is no sealed key, or the passphrase or the data are others.
    """
    found = build(_SealedKey, read_json(path), path)
    cipher = _cipher(passphrase, bytes.fromhex(found.salt))
    from cryptography.exceptions import InvalidTag

    try:
        opened = cipher.decrypt(
            bytes.fromhex(found.nonce), bytes.fromhex(found.sealed), FORMAT.encode()
        )
    except InvalidTag:
        raise BadInput(
            f"{path} does not open: the passphrase is another, or it is damaged"
        ) from None
    secret, salt, made_for = (opened[n : n + KEY_BYTES] for n in range(0, 3 * KEY_BYTES, KEY_BYTES))
    if made_for.hex() != data:
        raise BadInput(
            f"{path} was sealed for other rows than these, and its noise on other data would give "
            "them away; put the data of its run back"
        )
    key = Key(secret, is_reproducible=is_reproducible)
    return key, commitment(key, salt)


def commitment(key: Key, salt: bytes) -> str:
    """A hash that binds whoever publishes it to a key, and tells nothing about it."""
    secret = key.derive("commitment", salt)
    return hashlib.sha256(secret).hexdigest()


def read_passphrase(file: str | None) -> str:
    """The passphrase in a file's first line, or in the environment variable UNISON_PASSPHRASE.

    Raises:
        BadInput: If there is none, or it is too short.
    """
    if file is not None:
        data = read_bytes(Path(file), 1 << 16)
        try:
            found = data.decode().partition("\n")[0].removesuffix("\r")
        except UnicodeDecodeError:
            raise BadInput(f"{file} holds no passphrase: it is no text") from None
    else:
        found = os.environ.get(PASSPHRASE, "")
        if not found:
            raise BadInput(
                f"a sealed key needs a passphrase: --passphrase-file FILE, or {PASSPHRASE} in the "
                "environment"
            )
    if len(found) < LEAST_CHARACTERS:
        raise BadInput(
            f"a passphrase must have {LEAST_CHARACTERS} characters or more, found {len(found)}; "
            f"{secrets.token_urlsafe(12)!r} is one that nobody guesses"
        )
    return found


def _cipher(passphrase: str, salt: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
        from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
    except ImportError:
        raise BadInput(
            "a sealed key needs the package cryptography: pip install 'unison[seal]'"
        ) from None
    return ChaCha20Poly1305(Scrypt(salt=salt, length=32, **_SCRYPT).derive(passphrase.encode()))
