"""The table of all config keys, one module per part of the program."""
