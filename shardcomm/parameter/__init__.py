"""A parameter of which this rank has some rows: which part of the whole they are, and what may be done with them."""
