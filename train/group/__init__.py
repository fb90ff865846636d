"""Several runs that differ in their seed, trained at the same time in one process, each with the bits that it has alone."""
