"""The Predictor, its inputs and outputs, features, explanations; may use runs and the packages below."""
