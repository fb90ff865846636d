"""`train plan`: what a run will need, said before it is started."""
