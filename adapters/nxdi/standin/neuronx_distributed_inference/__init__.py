"""CPU stand-in for NxD Inference, by equiport: the public names that dense decoder ports use, and nothing else."""

import neuronx_distributed as _nxd

from equiport.errors import EquiportError

if not hasattr(_nxd, "__equiport_standin__"):
    raise EquiportError(
        "the stand-in of neuronx_distributed_inference cannot run on the real neuronx_distributed",
        where=str(_nxd.__file__),
        remedy="Give both real packages (EQUIPORT_NXDI_SRC and EQUIPORT_NXD_SRC), or neither",
    )

from neuronx_distributed._standin.missing import attribute_hook

__equiport_standin__ = True
__version__ = "0+equiport.standin"

__getattr__ = attribute_hook(__name__)
