"""Tables, plots and galleries."""
