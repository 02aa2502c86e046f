"""The run folder: its files, checkpoints, restored models, logs; may use config, pretrained and the packages below."""
