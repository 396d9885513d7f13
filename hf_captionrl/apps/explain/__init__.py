"""One caption, token by token."""
