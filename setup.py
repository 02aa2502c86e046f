"""What pyproject.toml cannot say to an index: a page without relative links, and requirements without an extra."""

import re
import tomllib
from pathlib import Path
from urllib.parse import urljoin

from setuptools import setup

FOLDER = Path(__file__).parent
PROJECT = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]


def absolute_links(page: str, repository: str = "") -> str:
    """Return Markdown whose relative links are addresses below `repository`, or text if that is ""."""

    def link(match: re.Match) -> str:
        text, target = match.groups()
        if "://" in target:
            return match[0]
        return f"{text}({urljoin(f'{repository}/', target)})" if repository else text.strip("![]")

    return re.sub(r"(!?\[[^]\[]*\])\(([^()\s]+)\)", link, page)


def requirements() -> list[str]:
    """Return the lines of requirements.txt that are not in the extra `tfds`."""
    lines = (FOLDER / "requirements.txt").read_text().splitlines()
    optional = PROJECT["optional-dependencies"]["tfds"]
    return [line for line in lines if line and not line.startswith("#") and line not in optional]


if __name__ == "__main__":
    setup(
        install_requires=requirements(),
        long_description=absolute_links((FOLDER / "README.md").read_text(), PROJECT["urls"].get("Repository", "")),
        long_description_content_type="text/markdown",
    )
