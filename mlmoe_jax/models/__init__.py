"""Backbones, adapters, experts, heads and losses; may use data and the packages below."""
