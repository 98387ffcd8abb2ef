"""`vlaunch soak`: a bounded load on a running server, and a verdict on the result."""
