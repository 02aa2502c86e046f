"""Backbones, adapters, experts, heads and losses; may use data and the rooms below."""
