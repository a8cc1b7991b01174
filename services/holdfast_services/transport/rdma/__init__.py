"""The transport over RDMA: the receiver reads parts straight out of the holder's memory.

``docs/reference/data-plane-rdma.md`` is normative. ``ports``, ``frames`` and ``flow`` are pure;
``verbs`` alone knows pyverbs; ``registered`` says who may read which memory; ``server`` and
``client`` are the two ends, ``transport`` both as one implementation of the port.
"""
