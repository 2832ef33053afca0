"""Any bytes give a value or one of our errors."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import fuzz_target

SEEDS = list(fuzz_target.seeds())

edits = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), max_size=4)
interesting = st.lists(
    st.tuples(
        st.integers(0, 200), st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**56, 2**63, 2**64 - 1])
    ),
    max_size=2,
)


@given(st.sampled_from(SEEDS), edits, interesting, st.integers(0, 20))
@settings(max_examples=400, deadline=None)
def test_a_forged_record_decodes_or_is_refused_by_a_record_error(seed, bytes_at, words_at, cut):
    blob = bytearray(seed)
    for at, value in bytes_at:
        blob[at % len(blob)] = value
    for at, value in words_at:
        place = 8 * at % len(blob)
        blob[place : place + 8] = value.to_bytes(8, "little")
    fuzz_target.check(bytes(blob[: len(blob) - cut]))


@pytest.mark.usefixtures("compiled")
def test_every_seed_is_intact_and_decodes():
    for seed in SEEDS:
        assert fuzz_target.check(seed) == "intact"
        at = 2 + int.from_bytes(seed[:2], "little")  # the record's checksum
        unsealed = seed[:at] + bytes([seed[at] ^ 1]) + seed[at + 1 :]
        assert fuzz_target.check(unsealed) == "decoded"
