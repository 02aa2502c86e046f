"""Numbers of other packages with which the tests compare; they are stored in `tests/parity`."""
