"""The forward step, the Predictor, its inputs and outputs, explanations, exports; may use runs and the rooms below."""
