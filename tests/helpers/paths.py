"""Where the repository, its tests and the parity numbers are."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
REPOSITORY = TESTS.parent
PARITY = TESTS / "parity"
