"""Storage for ``torch.distributed.checkpoint`` (DCP): its saves become Holdfast checkpoints.

A checkpoint of DCP belongs to no rank: values of one name are one value, whoever saves it. So it is
written as that of one rank, with a volume for what each rank of DCP has sent and a last one for the
text, and lies in a folder of its own like one of ``holdfast.save``. Nothing in a store is pickled
(P9): metadata are made of headers and text, values that are no tensors are typed JSON.
"""

from holdfast.integrations.dcp.job import HoldfastJob
from holdfast.integrations.dcp.reader import HoldfastReader
from holdfast.integrations.dcp.stager import HoldfastStager
from holdfast.integrations.dcp.writer import HoldfastWriter

__all__ = ["HoldfastJob", "HoldfastReader", "HoldfastStager", "HoldfastWriter"]
