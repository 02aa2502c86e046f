"""A ViT-Ti/16 at 160 px, distilled from EfficientNet-Lite2 on photographs."""
