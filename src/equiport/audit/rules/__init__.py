"""One rule a file; the registry lists them."""
