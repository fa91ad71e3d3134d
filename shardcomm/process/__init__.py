"""Ranks as processes of this host: N of them launched, and the stacks of those that hang."""
