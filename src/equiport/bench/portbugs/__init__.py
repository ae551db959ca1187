"""A corpus of porting bugs that is executed: operators on transformers' own classes and on generated ports."""
