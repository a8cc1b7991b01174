"""`holdfast execute`: has the launchers run on its node that the scheduler orders."""
