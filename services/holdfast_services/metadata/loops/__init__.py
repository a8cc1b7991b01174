"""What the clock asks of the catalogue: what is due is offered, what has expired goes."""
