"""Any bytes give a value or one of our errors: a little in CI, libFuzzer in the long mode."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import fuzz_target

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_libfuzzer_finds_no_bytes_that_a_decoder_chokes_on(tmp_path):
    pytest.importorskip(
        "atheris",
        reason="atheris is not installed: pip install 'egeria[fuzz]' (Linux, CPython <= 3.13)",
    )
    seconds = int(os.environ.get("EGERIA_FUZZ_S", "300"))
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.helpers.fuzzer", tmp_path / "corpus",
            f"-max_total_time={seconds}", "-timeout=30", "-rss_limit_mb=4096", "-max_len=8192",
            f"-artifact_prefix={tmp_path}/", "-print_final_stats=1",
        ],
        capture_output=True, text=True, check=False,
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    (runs,) = re.findall(r"number_of_executed_units: (\d+)", done.stderr)
    print(f"{int(runs):,} inputs in {seconds} s")
    assert int(runs) > 1000
