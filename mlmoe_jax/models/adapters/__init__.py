"""Adapters of a frozen backbone: prompts, additional keys and values, low-rank updates."""
