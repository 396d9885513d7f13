"""Applications of the library; none imports another."""
