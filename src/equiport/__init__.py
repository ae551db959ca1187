"""equiport: port HuggingFace models to AWS Neuron and prove, or disprove, that the port computes the same function."""

__version__ = "0.1.0"
