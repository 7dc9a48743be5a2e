"""What runs where the user calls."""
