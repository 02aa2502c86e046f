"""Where the repository, its tests, the parity numbers and the stored files are."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
REPOSITORY = TESTS.parent
PARITY = TESTS / "parity"
