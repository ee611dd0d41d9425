"""Made-up customer records, with secrets planted in them if asked.

A record depends on (seed, record index) only: the same bytes on every machine, in every process and
with every numpy version, because only raw Philox integers are drawn and never a distribution. The
people do not exist; the e-mail domains and telephone numbers are reserved for examples.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from unison import check
from unison.data.corpus import Corpus, Piece
from unison.errors import BadInput

DEFAULT_NUM_RECORDS = 20_000
MAX_RECORD_BYTES = 256
"""No record is longer, so that one fits a row of 256 byte tokens."""


def _words(text: str) -> list[str]:
    return text.split()


FIRST_NAMES = _words(
    """
    Ada Aisha Alan Alice Amara Amir Anna Arjun Ben Bruno Carla Chen Clara Dana David Diego Elena
    Eli Emma Erik Fatima Felix Freya Grace Hana Hugo Ida Ines Ivan Jane Jonas Julia Kai Karim
    Kira Lars Leila Leo Lina Lucia Luis Maja Marco Maria Mateo Mei Mia Mina Nadia Nils Noor Omar
    Oscar Petra Priya Rosa Ruben Sara Sofia Tariq Tomas Vera Yara Zoe
    """
)
LAST_NAMES = _words(
    """
    Abbas Adler Ahmed Alves Bauer Becker Berg Brown Chan Costa Cruz Diaz Doe Duran Engel Evans
    Fabre Fischer Flores Garcia Gomez Greene Haddad Hansen Hughes Ibarra Ito Jansen Jensen Kaya
    Keller Khan Klein Kovacs Kumar Lang Larsen Lee Lopez Maier Martin Mendes Meyer Moreau Nair
    Nguyen Novak Okafor Olsen Park Patel Perez Popov Rossi Ruiz Sato Schmid Silva Singh Smith
    Tanaka Weber Wood Zhang
    """
)
CITIES = _words(
    """
    Accra Athens Austin Bergen Berlin Bogotá Boston Cairo Chennai Dakar Dublin Geneva Hanoi Kobe
    Kraków Lagos Lima Lisbon London Lyon Madrid Málaga Milan Nairobi Osaka Oslo Porto Quito Riga
    Rome Tunis Zürich
    """
)
PLANS = ["basic", "family", "student", "business", "travel", "premium", "prepaid", "senior"]
OPENINGS = [
    "Hello,",
    "Hi,",
    "Good morning,",
    "Since Monday",
    "Once again",
    "Today",
    "Please help:",
    "Sorry,",
]
PROBLEMS = [
    "my invoice is wrong",
    "the app closes itself",
    "I was charged twice",
    "my card was refused",
    "the router is offline",
    "I cannot log in",
    "my parcel never came",
    "the discount is gone",
    "my number has changed",
    "calls drop all day",
    "I moved to a new flat",
    "the order is late",
    "the screen stays dark",
    "my refund is missing",
    "the link has expired",
    "I want to cancel",
]
WISHES = [
    "please call me back.",
    "can you check it?",
    "thank you in advance.",
    "what should I do?",
    "I need it this week.",
    "please send a new one.",
    "it is quite urgent.",
    "write to me by mail.",
]

NUM_NAMES = len(FIRST_NAMES) * len(LAST_NAMES)
# One stream of random numbers for each purpose: the second half of the Philox key.
_RECORD, _OWNER, _CODE, _PLACE, _DECOY = range(5)


@dataclass(frozen=True, kw_only=True)
class Secret:
    """A planted secret.

    Attributes:
        prefix: What stands before the code; a model that has memorised the secret continues it.
        code: The random part, uniform over 10**12 values: `dddd-dddd-dddd`.
        suffix: What stands after the code.
        record_indices: The records that carry it, in ascending order.
    """

    prefix: str
    code: str
    suffix: str
    record_indices: tuple[int, ...]

    @property
    def text(self) -> str:
        """The sentence as it stands in the records."""
        return self.with_code(self.code)

    def with_code(self, code: str) -> str:
        """The same sentence with another code, to compare its likelihood with."""
        return f"{self.prefix}{code}{self.suffix}"


class Records(Corpus):
    """Made-up customer records, each a document of at most 256 bytes.

    Args:
        num_records: How many records there are.
        num_secrets: How many secrets to plant; each has its own owner and code.
        secret_repeats: In how many records each secret is planted.
        seed: Chooses the records, the secrets and where they are planted.

    Raises:
        BadInput: A number is out of range, or the secrets need more records than there are.

    >>> corpus = Records(num_records=100, num_secrets=2, secret_repeats=3, seed=7)
    >>> secret = corpus.secrets[0]
    >>> len(secret.record_indices), secret.text in corpus.record(secret.record_indices[0])
    (3, True)
    """

    def __init__(
        self,
        *,
        num_records: int = DEFAULT_NUM_RECORDS,
        num_secrets: int = 0,
        secret_repeats: int = 1,
        seed: int = 0,
    ):
        check.positive(num_records=num_records, secret_repeats=secret_repeats)
        check.not_negative(num_secrets=num_secrets, seed=seed)
        if seed >= 1 << 64:
            raise BadInput(f"seed must be below 2**64, found {seed}")
        if num_secrets > NUM_NAMES:
            raise BadInput(
                f"num_secrets must be at most {NUM_NAMES}, one for each name there is, found "
                f"{num_secrets}"
            )
        if num_secrets * secret_repeats > num_records:
            raise BadInput(
                f"{num_secrets} secrets planted {secret_repeats} times each need "
                f"{num_secrets * secret_repeats} records, found {num_records=}; plant fewer, or "
                "ask for more records"
            )
        self.num_records = num_records
        self.seed = seed
        self.name = "records"
        self.secrets = _draw_secrets(seed, num_records, num_secrets, secret_repeats)
        self._secret_of_record = {
            index: number
            for number, secret in enumerate(self.secrets)
            for index in secret.record_indices
        }

    def record(self, index: int) -> str:
        """Compute one record, without computing any other.

        Args:
            index: The record's number, from 0.

        Returns:
            Its text.

        Raises:
            IndexError: There is no such record.
        """
        if not 0 <= index < self.num_records:
            raise IndexError(f"record indices run from 0 to {self.num_records - 1}, found {index}")
        draws = iter(_draw(self.seed, _RECORD, index, 20))
        owner = next(draws) % NUM_NAMES
        ticket = f"{_pick(OPENINGS, draws)} {_pick(PROBLEMS, draws)}, {_pick(WISHES, draws)}"
        number = self._secret_of_record.get(index)
        if number is not None:
            owner, ticket = _owner(self.seed, number), self.secrets[number].text
        first, last = _name(owner)
        mail = f"{first[0]}{last}{next(draws) % 100}".lower()
        domain = _pick(["com", "net", "org"], draws)
        date = f"{2010 + next(draws) % 15}-{1 + next(draws) % 12:02}-{1 + next(draws) % 28:02}"
        return (
            f"name: {first} {last}\n"
            f"id: C-{next(draws) % 10**6:06}\n"
            f"city: {_pick(CITIES, draws)}\n"
            f"email: {mail}@example.{domain}\n"
            f"phone: 555-01{next(draws) % 100:02}\n"
            f"plan: {_pick(PLANS, draws)} {5 + next(draws) % 60}.{next(draws) % 100:02}\n"
            f"since: {date}\n"
            f"due: {next(draws) % 900}.{next(draws) % 100:02}\n"
            f"ticket: {ticket}\n"
        )

    def decoy_codes(self, num_codes: int) -> list[str]:
        """Draw codes of the same form that were not planted, to rank a planted one among.

        Args:
            num_codes: How many.

        Returns:
            The codes; the same for the same seed.
        """
        check.not_negative(num_codes=num_codes)
        planted = {secret.code for secret in self.secrets}
        codes, index = [], 0
        while len(codes) < num_codes:
            code = _code(self.seed, _DECOY, index)
            codes += [code] if code not in planted else []
            index += 1
        return codes

    def pieces(self) -> Iterator[Piece]:
        """Compute the records in order; every one is one document and one piece."""
        for index in range(self.num_records):
            yield Piece(self.record(index), ends_document=True, source=f"record {index}")

    def __len__(self) -> int:
        return self.num_records


def _draw(seed: int, stream: int, index: int, count: int) -> list[int]:
    """Draw `count` raw 64-bit integers that depend on (seed, stream, index) only.

    The index is the second word of the counter; drawing increments the first.
    """
    key = np.array([seed, stream], dtype=np.uint64)
    counter = np.array([0, index, 0, 0], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count).tolist()


def _pick(words: list[str], draws: Iterator[int]) -> str:
    return words[next(draws) % len(words)]


def _name(owner: int) -> tuple[str, str]:
    return FIRST_NAMES[owner % len(FIRST_NAMES)], LAST_NAMES[owner // len(FIRST_NAMES)]


def _owner(seed: int, number: int) -> int:
    """The name of secret `number`: an affine walk with an odd step, so that no two share a name."""
    start, step = _draw(seed, _OWNER, 0, 2)
    return (start + number * (step | 1)) % NUM_NAMES


def _code(seed: int, stream: int, index: int) -> str:
    digits = f"{_draw(seed, stream, index, 1)[0] % 10**12:012}"
    return f"{digits[:4]}-{digits[4:8]}-{digits[8:]}"


def _draw_secrets(
    seed: int, num_records: int, num_secrets: int, secret_repeats: int
) -> tuple[Secret, ...]:
    used: set[int] = set()
    attempt = 0
    secrets = []
    for number in range(num_secrets):
        places: list[int] = []
        while len(places) < secret_repeats:
            place = _draw(seed, _PLACE, attempt, 1)[0] % num_records
            attempt += 1
            if place not in used:
                used.add(place)
                places.append(place)
        first, last = _name(_owner(seed, number))
        secrets.append(
            Secret(
                prefix=f"The access code of {first} {last} is ",
                code=_code(seed, _CODE, number),
                suffix=".",
                record_indices=tuple(sorted(places)),
            )
        )
    return tuple(secrets)
