"""The forward step, the Predictor, its inputs and outputs, explanations; may use runs and the rooms below."""
