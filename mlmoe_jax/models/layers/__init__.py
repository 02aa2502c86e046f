"""The layers that backbones and heads are made of."""
