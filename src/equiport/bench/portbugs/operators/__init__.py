"""Bugs, one file a part of the model; every subclass of BugOperator defined here is in the corpus."""
