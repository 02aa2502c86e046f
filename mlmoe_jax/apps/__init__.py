"""All that one uses around the core, and all that prints; may use training and the packages below."""
