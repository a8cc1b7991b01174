"""How fast a job makes progress on so many GPUs: step time, efficiency, goodput, and their fit.

*Goodput* is progress in samples of the initial batch size per second: throughput times the
efficiency of a batch. Pure: no clock, no I/O, but NumPy (extra ``elastic``). Used by the SDK,
where a job chooses its batch size, and by the scheduler, where jobs get GPUs.

Source: Pollux, OSDI 2021 (arXiv 2008.12260), sections 3 and 4.1.
"""
