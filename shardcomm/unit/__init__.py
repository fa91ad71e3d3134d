"""Which parameters are gathered together, over which ranks and in which dtypes; nothing is allocated here."""
