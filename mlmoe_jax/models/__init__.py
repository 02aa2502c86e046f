"""Backbones, prompts, experts and heads; nothing here knows of data sets or training."""
