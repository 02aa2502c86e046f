"""Write docs/configuration.md, the reference of all config keys.

python -m tools.docs.write_configuration
"""

from __future__ import annotations

from pathlib import Path

from mlmoe_jax.config.reference import reference_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"

if __name__ == "__main__":
    PAGE.write_text(reference_page())
