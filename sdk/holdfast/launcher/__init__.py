"""``holdfast run``: starts the ranks of one node, and starts them again in a second.

Rounds are decided by the metadata service; a launcher does what its view says.
"""
