"""The ledger: what was applied, written before it is released, in lines that only grow in number.

[Note: never less than was released] A step writes an *intent*, which is on the disk before any
noise is drawn, and a *commit* after the optimizer's step. ε counts intents. Whenever a process
dies, what it released has an intent, and a step that is repeated after a restart has two.

Here a ledger is written; ledger_file.py says what its lines hold, and reads them.
"""

import hashlib
import hmac
import json
import os
import secrets
import stat
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unison.errors import BadInput, OutOfRoom
from unison.privacy.accounting import (
    Spending,
    check_accountant,
    epsilon_if_secret,
    epsilon_of,
)
from unison.privacy.ledger_file import FORMAT, START, Head, Session, head_file_of, read_ledger
from unison.privacy.mechanism import Mechanism, Release
from unison.schema import open_regular, version_of


class Ledger:
    """A ledger that is being written. Use as a context manager, or `close` it.

    Guarantees:
        When `intend` returns, the intent is on the disk. Nothing that was written is ever changed.
        One process writes at a time. No key, no realised batch and nothing else that depends on
        the data is written.

    Attributes:
        path: The file; None for a ledger in memory, which does not survive its process.
        accountant: The accountant that `epsilon` uses unless told otherwise.
        spending: What the intents come to, those of earlier sessions included.
        session: What the session that is being written says of itself.
        head: How far the ledger goes.
        num_intents: Intents, those of earlier sessions included.
        num_commits: Commits, those of earlier sessions included.
        is_copy: Whether another rank writes the file of which this ledger, in memory, counts all.
    """

    is_copy = False

    def __init__(self, path: Path | None, accountant: str, session: Session) -> None:
        self.path, self.accountant, self.session = path, accountant, session
        self.spending = Spending()
        self._descriptor: int | None = None
        self._before_next = b""
        self.head = Head(0, START)
        self._written: set[Head] = set()  # of a ledger in memory: what checkpoints may know
        self._pending: int | None = None
        self._last_step = -1
        self.num_intents = self.num_commits = 0
        self._failure: str | None = None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | None,
        *,
        mechanism: Mechanism,
        accountant: str = "pld",
        step: int = 0,
        session: Session | None = None,
        earlier: "Ledger | None" = None,
    ) -> "Ledger":
        """Begin a ledger, or go on with one after checking all of it.

        Args:
            path: The file, usually RUN/ledger.jsonl; None keeps the ledger in memory.
            mechanism: What the session applies; its description begins the session.
            accountant: "pld", "rdp" or "odometer".
            step: The step that comes next.
            session: Where the key comes from, and what else the session says of itself; that it
                is not known unless given.
            earlier: One in memory that this one goes on with, if it is in memory too.

        Raises:
            BadInput: If lines of the ledger were edited or removed, or another process writes it.
        """
        check_accountant(accountant)
        ledger = cls(None if path is None else Path(path), accountant, session or Session())
        try:
            if ledger.path is not None:
                ledger._take_up(ledger.path)
            elif earlier is not None:
                ledger.spending, ledger.head = earlier.spending, earlier.head
                ledger.num_intents, ledger.num_commits = earlier.num_intents, earlier.num_commits
                ledger._written = earlier._written
            ledger.renew(mechanism, step=step)
        except BaseException:
            ledger.close()
            raise
        return ledger

    def renew(self, mechanism: Mechanism, *, step: int, key_origin: str | None = None) -> None:
        """Begin a new session, in which records are drawn under another key.

        Steps of one session only go up. To repeat one in the same process, renew the keys first and
        call this: a step that is drawn again under the same key takes the same records, and two
        looks at one sample cost more than two independent samples do.

        Args:
            mechanism: What the session applies.
            step: The step that comes next.
            key_origin: Where the other key comes from (`Key.origin`); as before unless given.
        """
        if key_origin is not None:
            self.session = replace(self.session, key_origin=key_origin)
        plan = mechanism.describe()
        self._append(
            "open",
            format=FORMAT,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            id=secrets.token_hex(8),  # two runs of one second are two runs
            unison=version_of("unison") or "unknown",  # of a source tree
            accountant=self.accountant,
            **asdict(self.session),
            mechanism=plan,
            next=mechanism.release(step).to_fields(),
        )
        was_chosen = self.spending.is_chosen
        self.spending.begin_session(plan, is_seeded=self.session.is_seeded)
        if self.spending.is_chosen and not was_chosen and self.accountant != "odometer":
            warnings.warn(
                "this run applies another noise multiplier or sampling than the ledger's last "
                "session, which may have been chosen from what came out: ε is an odometer's now "
                "(docs/privacy.md); go on with the same, or give the run a ledger of its own",
                stacklevel=3,
            )
        self._pending, self._last_step = None, -1

    def intend(self, release: Release) -> None:
        """Write what a step is about to apply. Draw its noise only after this has returned.

        Raises:
            BadInput: If the session holds that step, or a later one, already.
        """
        if release.step <= self._last_step:
            raise BadInput(
                f"expected a step after {self._last_step}, the last of this session, found step "
                f"{release.step}; renew the keys and call Ledger.renew before repeating a step"
            )
        self._append("intent", release, **release.to_fields())
        self._pending = self._last_step = release.step
        self.num_intents += 1

    def commit(self, step: int) -> None:
        """Write that the optimizer has taken a step."""
        if step != self._pending:
            raise BadInput(f"expected to commit the intended step {self._pending}, found {step}")
        self._append("commit", step=step)
        self._pending = None
        self.num_commits += 1

    def epsilon(self, delta: float, accountant: str | None = None) -> float:
        """ε at δ of all intents: infinite if the noise of one came from a seed."""
        return epsilon_of(self.spending, delta, accountant or self.accountant)

    def epsilon_if_secret(self, delta: float, accountant: str | None = None) -> float:
        """ε at δ of all intents as if every key had been secret."""
        return epsilon_if_secret(self.spending, delta, accountant or self.accountant)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint should hold, as values that JSON can hold."""
        return {
            "is_in_memory": self.path is None,
            "head": asdict(self.head),
            "spending": self.spending.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make sure that nothing is lost that was counted when a checkpoint was written.

        A ledger on disk must hold the line that the checkpoint knows as its last. A ledger in
        memory takes over what the checkpoint counted; what was released after the checkpoint is
        lost with the process, which is why a run that matters has a file.

        Raises:
            BadInput: If the file does not hold that line.
        """
        if self.is_copy:
            return  # the rank that has the file looks there; this one was told what it counts
        known = Head(**state["head"])
        if self.path is None:
            if known in self._written:
                return  # a checkpoint of this very run: what came after it stays counted
            if self.num_intents:
                raise BadInput(
                    "this ledger in memory counts steps of another run; load a checkpoint before "
                    "the first step"
                )
            self.spending.load_state_dict(state["spending"])
            return
        if state["is_in_memory"]:
            raise BadInput(
                f"the checkpoint's ledger was kept in memory, and {self.path} does not hold its "
                "steps; resume without a ledger file"
            )
        problem = read_ledger(self.path).missing(known, "the checkpoint")
        if problem:
            raise BadInput(f"{self.path}: {problem}; put the ledger of this run back")

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)  # the lock goes with it
            self._descriptor = None
        self._failure = self._failure or "it was closed"

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = "in memory" if self.path is None else str(self.path)
        return f"Ledger({where}, {self.num_intents} intents, {self.num_commits} commits)"

    # ---- the file --------------------------------------------------------------------------------

    def _take_up(self, path: Path) -> None:
        """Open and lock the file; check and count what it holds."""
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self._descriptor = os.open(path, flags, 0o644)
        except OSError as error:
            raise BadInput(f"cannot write the ledger {path}: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            raise BadInput(f"the ledger {path} is no ordinary file; give the run another one")
        import fcntl  # not on every system that can import unison

        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(
                f"another process, or another ledger of this one, writes {path}; let it end first, "
                "or give this run a folder of its own"
            ) from None
        if is_new:
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        if not path.stat().st_size and not head_file_of(path).exists():
            return
        found = read_ledger(path)
        if found.problems:
            raise BadInput(
                f"{path} cannot be continued: {'; '.join(found.problems)}. Its count would not be "
                "one; begin the run anew, or put the whole ledger back"
            )
        self.spending, self.head = found.spending, found.head
        self.num_intents, self.num_commits = found.num_intents, found.num_commits
        if not found.ends_with_newline:
            # What a crash cut short stays as it is; the next line begins after it.
            self._before_next = b"\n"

    def _append(self, kind: str, release: Release | None = None, **fields: Any) -> None:
        """Write one line; it is on the disk when this returns, and its release is counted."""
        if self._failure:
            raise BadInput(f"the ledger {self.path} cannot be written any more: {self._failure}")
        if release is not None:
            self.spending.add(release)  # first: if writing fails, it may count once too often
        number = self.head.num_lines + 1
        record = {"kind": kind, "line": number, **fields, "previous": self.head.sha256}
        line = json.dumps(record, allow_nan=False).encode()
        try:
            if self._descriptor is not None:
                data = self._before_next + line + b"\n"
                written = os.write(self._descriptor, data)
                os.fsync(self._descriptor)
                if written < len(data):
                    raise OSError(f"only {written} of {len(data)} bytes were; is the disk full?")
            self._before_next, self.head = b"", Head(number, hashlib.sha256(line).hexdigest())
            if self.path is None:
                self._written.add(self.head)
            else:
                _write_head(self.path, self.head)
        except BaseException as error:
            # How much is on the disk is not known now; opening the ledger anew finds out.
            self._failure = f"a write failed ({error!r}); open it anew"
            if isinstance(error, OSError):
                raise OutOfRoom(
                    f"the ledger {self.path} could not be written: {error}; the step was not taken"
                ) from error
            raise


def _write_head(path: Path, head: Head) -> None:
    # Not synced: it witnesses lines that are on the disk already, and may lag behind them.
    target = head_file_of(path)
    # A name that nobody can foresee, and only a file of ours: a link in its place would lead the
    # write to whatever it points at.
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
    _write_new(partial, json.dumps(asdict(head)).encode() + b"\n", mode=0o644)
    partial.replace(target)


def _write_new(path: Path, data: bytes, *, mode: int) -> None:
    """Write a file that is not there yet, not even as a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, mode), "wb") as file:
        file.write(data)


# ---- the data set --------------------------------------------------------------------------------

DataSalt = bytes | str | os.PathLike[str]


def commit_to_data(
    session: Session,
    *,
    salt: DataSalt | None,
    data_id: str | None,
    ledger: str | os.PathLike[str] | None,
) -> Session:
    """Return the session with a commitment to its data set, if there is a salt for it.

    Runs on one data set have one commitment, so that what they spend can be added up. Without the
    salt, which stays with the data, nobody can try what it was made of.

    Args:
        session: It knows how many records there are.
        salt: 16 bytes or more; or a file that holds them, which is made if it is not there.
        data_id: What else names the data set, such as a hash of its files.
        ledger: The run's ledger, beside which the salt must not lie.

    Raises:
        BadInput: If the salt is too short, or lies in the run's folder; or an id has no salt.
    """
    if salt is None:
        if data_id is not None:
            raise BadInput("data_id= is written under a salt: give data_salt= too")
        return session
    if not isinstance(salt, bytes):
        folder = None if ledger is None else Path(ledger).resolve().parent
        salt = _read_salt(Path(salt), folder)
    if len(salt) < 16:
        raise BadInput(f"data_salt must have 16 bytes or more, found {len(salt)}")
    message = json.dumps(["unison-data/1", session.num_records, data_id]).encode()
    return replace(
        session,
        commitment=hmac.new(salt, message, hashlib.sha256).hexdigest(),
        committed_to="number of records" + (" and data_id" if data_id is not None else ""),
    )


def _read_salt(path: Path, run_folder: Path | None) -> bytes:
    if run_folder is not None and run_folder in path.resolve().parents:
        raise BadInput(
            f"the salt {path} lies in the run's folder, where whoever gets the ledger finds it: "
            "put it beside the data"
        )
    try:
        if not path.exists():
            # Complete at once, whoever else begins a run at this moment.
            partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
            _write_new(partial, secrets.token_hex(32).encode() + b"\n", mode=0o600)
            try:
                os.link(partial, path)
            except FileExistsError:
                pass
            finally:
                partial.unlink()
        with open_regular(path) as file:
            return file.read(1 << 16).strip()
    except OSError as error:
        raise BadInput(f"cannot read or make the salt {path}: {error.strerror}") from None
