"""The programs around the core, and all printing; may use training and the packages below."""
