"""CPU stand-in for NxD, by equiport: the public names that dense decoder ports use, and nothing else."""

from neuronx_distributed._standin.missing import attribute_hook, install

__equiport_standin__ = True
__version__ = "0+equiport.standin"

install()
__getattr__ = attribute_hook(__name__)
