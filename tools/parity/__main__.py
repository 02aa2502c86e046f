"""Make the numbers of other packages with which the tests compare; needs the extra "parity".

python -m tools.parity                 # all of them, in tests/parity
python -m tools.parity vit query       # the files of tools/parity/vit.py and query.py
"""

import argparse
import importlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = sorted(file.stem for file in HERE.glob("*.py") if not file.stem.startswith("_"))
STORED = HERE.parents[1] / "tests" / "parity"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--out", type=Path, default=STORED, help="the folder for the files (default: tests/parity)")
    flags = parser.parse_args()
    if unknown := set(flags.names) - set(NAMES):
        parser.error(f"there is no {min(unknown)}")
    for name in flags.names or NAMES:
        importlib.import_module(f"tools.parity.{name}").write(flags.out)


if __name__ == "__main__":
    main()
