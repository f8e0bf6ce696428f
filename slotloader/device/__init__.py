"""The device path: staging, padding, policies, and actions on their way back. What an adapter implements."""
