"""What travels beside the slots: sockets, pickles, and what workers report."""
