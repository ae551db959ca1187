"""Takes in a port as it is: what kind it is, which source model it belongs to, what can be validated of it."""
