"""Layers shared by backbones and heads."""
