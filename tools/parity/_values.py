"""Values of twins with batch normalization."""

import numpy as np
import torch


def randomise(model, seed, *, variance=1.5, bias=0.2):
    """Give every tensor of a model values that half precision holds exactly, none of which can be overlooked.

    Kernels have the variance `variance` / inputs, and biases the standard deviation `bias`.
    """
    random = np.random.RandomState(seed)
    values = {}
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        if name.endswith("num_batches_tracked"):
            value = np.array(7)
        elif name.endswith("running_var"):
            value = random.uniform(0.5, 2, shape)
        elif name.endswith("running_mean"):
            value = 0.3 * random.randn(*shape)
        elif name.endswith("layer_scale_parameter"):
            value = 0.5 * random.randn(*shape)
        elif len(shape) > 1:
            value = random.randn(*shape) * (variance / np.prod(shape[1:])) ** 0.5
        elif name.endswith("weight"):
            value = random.uniform(0.5, 1.5, shape)
        else:
            value = bias * random.randn(*shape)
        values[name] = torch.from_numpy(value.astype(np.float16)).to(tensor.dtype)
    model.load_state_dict(values)
    return model.eval()
