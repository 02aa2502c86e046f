"""Prefixes of what has a name and no path: models on the Hugging Face hub, and what comes with installed packages."""

HUB, DEMO = "hf:", "demo:"
