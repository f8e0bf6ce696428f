"""The environment's side: one env in one slot, the loops that serve them, the process around them."""
