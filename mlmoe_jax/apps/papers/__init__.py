"""The published numbers of the two papers, with their caveats and the configs that reproduce them."""
