"""The settings of all services: what is in force, where from, and the page about them."""
