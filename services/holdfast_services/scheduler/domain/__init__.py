"""Rules of the scheduler: pure functions of facts and a time."""
