"""Root causes, one file a family; every subclass of Hypothesis defined here is tried."""
