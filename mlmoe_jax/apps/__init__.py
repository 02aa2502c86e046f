"""The command line and all other programs of the package. It may import `training` and the packages below that."""
