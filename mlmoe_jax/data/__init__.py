"""From files to the input of the network: sources, label statistics, transforms, batches; may use runtime."""
