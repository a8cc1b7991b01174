"""The command line: ``holdfast COMMAND``; ``arguments`` lists the commands, ``main`` runs one."""
