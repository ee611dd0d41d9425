import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable

import pytest
import torch

from tests.harness import World, ranks
from unison.errors import BadInput
from unison.rng import Cipher, Key, NoiseClock, Stream, words_of_streams


def test_keys_from_entropy_differ_and_are_secret():
    a, b = Key.from_entropy(), Key.from_entropy()
    assert a != b
    assert not a.is_reproducible
    assert a.derive("x") != b.derive("x")


def test_keys_from_seeds_repeat():
    assert Key.from_seed(7) == Key.from_seed(7)
    assert Key.from_seed(7) != Key.from_seed(8)
    assert Key.from_seed(7).is_reproducible
    # Pinned: a change here changes every run that is repeated from a seed.
    assert Key.from_seed(0).derive("pin", size=8).hex() == "253f3bf301eb2be0"


@pytest.mark.parametrize("seed", [1.0, "1", True, None])
def test_seeds_are_integers(seed):
    with pytest.raises(BadInput, match="integer seed"):
        Key.from_seed(seed)


def test_repr_never_shows_bytes():
    key = Key.from_seed(3)
    stream = Stream(key, "w", cipher=Cipher.CHACHA20)
    shown = repr(key) + str(key) + repr(stream) + repr(NoiseClock(key))
    for secret in (key._bytes, *(word.to_bytes(4, "little") for word in stream.words)):
        assert secret.hex() not in shown
        assert repr(secret)[2:-1] not in shown
        assert str(int.from_bytes(secret, "little")) not in shown


@pytest.mark.parametrize("save", [
    copy.copy, copy.deepcopy, pickle.dumps, lambda x: torch.save(x, io.BytesIO()),
    lambda x: torch.save({"state": [x]}, io.BytesIO()), lambda x: x.__getstate__(),
], ids=["copy", "deepcopy", "pickle", "torch.save", "nested", "getstate"])  # fmt: skip
@pytest.mark.parametrize("make", [lambda k: k, lambda k: Stream(k, "w")], ids=["key", "stream"])
def test_keys_cannot_be_saved(save, make):
    with pytest.raises(TypeError, match="cannot be copied, pickled or saved"):
        save(make(Key.from_entropy()))


def test_derivation_keeps_lists_of_parts_apart():
    key = Key.from_seed(0)
    lists = [
        ("ab", "c"),
        ("a", "bc"),
        ("abc",),
        ("abc", ""),
        (b"abc",),
        ("1",),
        (1,),
        (1, 1),
        (11,),
    ]
    assert len({key.derive(*parts) for parts in lists}) == len(lists)


def test_streams_differ_by_every_part():
    key = Key.from_seed(0)
    streams = [
        Stream(key, "w"), Stream(key, "v"), Stream(key, "w", step=1),
        Stream(key, "w", purpose="noise"), Stream(key, "w", cipher=Cipher.CHACHA20),
        Stream(Key.from_seed(1), "w"),
    ]  # fmt: skip
    assert len({stream.words[:4] for stream in streams}) == len(streams)


NAMES = ["w", "", "layers.0.weight", "ü", "w" * 300, "w"]


@pytest.mark.parametrize("cipher", Cipher)
def test_words_of_many_streams_are_those_of_each(cipher):
    key = Key.from_entropy()
    for step, purpose in [(0, "init"), (1 << 40, "noise")]:
        found = words_of_streams(key, NAMES, step=step, purpose=purpose, cipher=cipher)
        assert found.dtype == torch.int64
        streams = [Stream(key, name, step, purpose, cipher) for name in NAMES]
        assert found.tolist() == [list(stream.words) for stream in streams]
        assert int(found.max()) > 2**31  # words are not signed
    none = words_of_streams(key, [], step=0, purpose="init", cipher=cipher)
    assert none.shape == (0, cipher.num_key_words)
    with pytest.raises(BadInput, match="step"):
        words_of_streams(key, NAMES, step=-1, purpose="init", cipher=cipher)


@ranks(1, 2)
def test_ranks_agree(world: World):
    shared = Key.shared()
    assert len(set(world.gather(shared.fingerprint()))) == 1
    assert not shared.is_reproducible
    own = Key.from_seed(world.rank)
    assert own.agree() == Key.from_seed(0)


@ranks(2)
def test_ranks_renew_together(world: World):
    clock = NoiseClock(Key.from_seed(0))
    clock.advance(5)
    clock.renew()
    assert len(set(world.gather(clock.advance(0).fingerprint()))) == 1


def test_secret_steps_are_used_once_in_a_process():
    key = Key.from_entropy()
    clock = NoiseClock(key)
    first = clock.advance(3)
    assert clock.advance(4) == first
    with pytest.raises(BadInput, match="already drawn"):
        clock.advance(4)
    with pytest.raises(BadInput, match=r"renew\(\)"):
        NoiseClock(key).advance(1)  # another object, as after loading old state
    assert NoiseClock(key, "sampling").advance(1) != first


def test_renewal_allows_old_steps_with_new_noise():
    clock = NoiseClock(Key.from_entropy())
    before = clock.advance(9)
    clock.renew()
    after = clock.advance(2)
    assert after != before
    with pytest.raises(BadInput, match="already drawn"):
        clock.advance(2)


def test_seeded_clocks_may_run_again_but_not_rewind():
    a, b = NoiseClock(Key.from_seed(1)), NoiseClock(Key.from_seed(1))
    assert a.advance(1) == b.advance(1)
    with pytest.raises(BadInput, match="already drawn"):
        a.advance(1)
    a.renew()
    assert not a.advance(1).is_reproducible


def in_a_fork(function: Callable[[], object]) -> str:
    """What a fork of this process gets from a function, as text."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def run() -> None:
        try:
            theirs.send(repr(function()))
        except BadInput as error:
            theirs.send(f"BadInput: {error}")

    process = context.Process(target=run)
    process.start()
    assert ours.poll(60)
    answer = ours.recv()
    process.join()
    return answer


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_fork_may_not_use_the_secret_key_of_its_parent():
    key = Key.from_entropy()
    clock = NoiseClock(key)
    uses = [
        lambda: key.derive("x"),
        lambda: words_of_streams(key, ["w"], step=0, purpose="init", cipher=Cipher.PHILOX),
        lambda: key.child("x"),
        key.agree,
        lambda: clock.advance(0),
        clock.renew,
        lambda: Stream(key, "w").words,
    ]
    for use in uses:
        answer = in_a_fork(use)
        assert answer.startswith("BadInput: a secret key of process"), answer
        assert "in the process that trains" in answer
    # What a fork makes itself is its own; and the parent's is still the parent's.
    assert in_a_fork(lambda: len(Key.from_entropy().derive("x"))) == "32"
    clock.advance(0).derive("x")


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_keys_from_seeds_may_fork():
    key = Key.from_seed(1)
    assert in_a_fork(lambda: key.derive("x")) == repr(key.derive("x"))
