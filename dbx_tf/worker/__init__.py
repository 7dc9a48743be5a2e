"""What runs on the servers."""
