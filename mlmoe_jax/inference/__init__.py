"""The forward step and the Predictor, what goes in and comes out, explanations."""
