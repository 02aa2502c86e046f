"""What the training labels say about one another: names, groups, graphs, word vectors."""
