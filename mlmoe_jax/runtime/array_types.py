"""Types of NumPy arrays without shapes, for values whose shapes are in the docstring."""

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, np.ndarray]  # by name
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Reals = NDArray[np.floating]  # float32 or float64
