"""The metadata service: the only writer of the catalogue; it decides commits and restores."""
