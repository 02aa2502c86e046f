"""Multi-label image classification with frozen backbones, group prompts and mixtures of experts."""

__version__ = "0.1.0"
