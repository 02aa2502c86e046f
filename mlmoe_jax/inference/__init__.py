"""Label images with a trained model, extract backbone features, and explain predictions.

Modules of this package may import `runs` and the packages below it.
"""
