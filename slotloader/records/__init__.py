"""What an environment exchanges, as data: leaves and trees, spaces, values in and out of rows, step types."""
