"""The region that both sides see, and the only code that writes its control words."""
