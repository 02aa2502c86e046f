"""Statistics of the training labels: names, counts, groups, graphs and word vectors."""
