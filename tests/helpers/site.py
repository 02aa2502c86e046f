"""The program that builds the site of the documentation, as a module."""

import importlib.util
import sys

from helpers.paths import REPOSITORY

_SPEC = importlib.util.spec_from_file_location("build_site", REPOSITORY / "docs" / "build_site.py")
site = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = site
_SPEC.loader.exec_module(site)
