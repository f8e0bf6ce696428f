"""The trainer's side: which records form a batch, who holds it, how it is answered, what it tells."""
