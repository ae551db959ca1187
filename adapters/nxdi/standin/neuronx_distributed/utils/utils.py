"""Names of the platforms."""

from enum import Enum

from neuronx_distributed._standin.missing import attribute_hook

__getattr__ = attribute_hook(__name__)


class hardware(Enum):
    """A platform generation; the instance names of one generation map to one member."""

    TRN1 = "trn1"
    TRN2 = "trn2"
    TRN3 = "trn3"

    @classmethod
    def _missing_(cls, value: object) -> "hardware | None":
        return cls.TRN1 if value in ("trn1n", "inf2") else None
