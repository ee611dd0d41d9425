import struct

import pytest
import torch

from unison.kernels.random import (
    CHACHA_CONSTANTS,
    chacha20,
    chacha20_blocks,
    philox,
    philox_blocks,
)

# Random123, kat_vectors, philox4x32 with 10 rounds: counter, key, result.
PHILOX_VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip

# RFC 8439, section 2.3.2: key 00..1f, nonce 00:00:00:09:00:00:00:4a:00:00:00:00, counter 1.
RFC_BLOCK = (
    "e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3 "
    "466482d2 09aa9f07 05d7c214 a2028bd9 d19c12b5 b94e16de e883d0cb 4e3c50a2"
)
# RFC 8439, section 2.4.2: the key stream of blocks 1 and 2, nonce 00:..:00:4a:00:00:00:00.
RFC_STREAM = (
    "224f51f3401bd9e12fde276fb8631ded8c131f823d2c06e27e4fcaec9ef3cf788a3b0aa372600a92b57974cded2b9334"
    "794cba40c63e34cdea212c4cf07d41b769a6749f3f630f4122cafe28ec4dc47e26d4346d70b98c73f3e9c53ac40c5945"
    "398b6eda1a832c89c167eacd901d7e2bf363"
)


def hex_words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX_VECTORS)
def test_philox_known_answers(counter, key, expected):
    words = philox([torch.tensor([word]) for word in hex_words(counter)], hex_words(key))
    assert [int(word) for word in words] == hex_words(expected)


def test_philox_blocks_use_a_64_bit_block_number():
    # The vector of pi's digits, with the block number holding counter words 0 and 1.
    counter, key = hex_words(PHILOX_VECTORS[2][0]), hex_words(PHILOX_VECTORS[2][1])
    low31 = 0x7FFFFFFF  # block numbers are below 2^63
    block = torch.tensor([((counter[1] & low31) << 32) | counter[0]])
    words = philox_blocks(block, (*key, counter[2], counter[3]))
    direct = philox(
        [torch.tensor([c]) for c in (counter[0], counter[1] & low31, *counter[2:])], key
    )
    assert words[0].tolist() == [int(word) for word in direct]


def rfc_state(counter: int, nonce: tuple[int, int, int]) -> torch.Tensor:
    key = struct.unpack("<8I", bytes(range(32)))
    return torch.tensor([*CHACHA_CONSTANTS, *key, counter, *nonce])


def test_chacha20_known_block():
    block = chacha20(rfc_state(1, (0x09000000, 0x4A000000, 0)))
    assert block.tolist() == hex_words(RFC_BLOCK)


def test_chacha20_known_key_stream():
    blocks = [chacha20(rfc_state(counter, (0, 0x4A000000, 0))) for counter in (1, 2)]
    stream = b"".join(struct.pack("<16I", *block.tolist()) for block in blocks)
    expected = bytes.fromhex(RFC_STREAM)
    assert stream[: len(expected)] == expected


@pytest.mark.parametrize("block", [0, 1, 2**32 - 1, 2**32, 2**40 + 3, 2**62])
def test_chacha20_blocks_use_a_64_bit_counter(block):
    key = (*struct.unpack("<8I", bytes(range(32))), 7, 9)
    words = chacha20_blocks(torch.tensor([block]), key)[0]
    state = torch.tensor([*CHACHA_CONSTANTS, *key[:8], block & 0xFFFFFFFF, block >> 32, 7, 9])
    assert torch.equal(words, chacha20(state))


def test_a_64_bit_counter_is_the_rfc_counter_with_a_longer_carry():
    # RFC: 32-bit counter, 96-bit nonce. Ours: the first nonce word is the counter's upper half.
    key = struct.unpack("<8I", bytes(range(32)))
    ours = chacha20_blocks(torch.tensor([(0x09000000 << 32) | 1]), (*key, 0x4A000000, 0))
    assert ours[0].tolist() == hex_words(RFC_BLOCK)
