"""A parameter of which this rank has some rows: what they are of the whole, and what may be done with them."""
