"""What runs inside a batch job."""
