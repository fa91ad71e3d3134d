"""A unit at run time: its full parameters come and go, and its gradients are reduced."""
