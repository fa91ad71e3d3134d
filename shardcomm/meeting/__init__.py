"""How the processes of a run find each other, before there is a communicator between them."""
