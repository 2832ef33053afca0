"""Fuzz the decoders of stored bytes under libFuzzer.

python -m tests.helpers.fuzzer CORPUS -max_total_time=60 ...: the seeds are written to CORPUS, the
other arguments are libFuzzer's. The package's own modules are instrumented while they are imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

STORE = ("codecs", "records")


def main() -> None:
    with atheris.instrument_imports(include=[f"egeria_cache.store.{name}" for name in STORE]):
        from tests.helpers import fuzz_target

    corpus = Path(sys.argv[1])
    corpus.mkdir(exist_ok=True)
    for number, seed in enumerate((*fuzz_target.seeds(), *fuzz_target.fields())):
        (corpus / f"seed-{number}").write_bytes(seed)

    def fuzz(blob: bytes) -> None:
        fuzz_target.check(blob)

    atheris.Setup(sys.argv, fuzz)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
