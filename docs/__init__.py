"""The documentation, and in `make` the code that writes the generated parts of it."""
