"""Published weights: downloading, reading and renaming them, in and out; may use models and the packages below."""
