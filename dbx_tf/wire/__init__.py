"""What passes between the driver and the workers."""
