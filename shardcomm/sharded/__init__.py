"""Units at run time: their full parameters come and go, and their gradients are reduced."""
