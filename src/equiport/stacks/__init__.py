"""Serving stacks: the adapter contract, how an adapter is found, and what is read from a port's source."""
