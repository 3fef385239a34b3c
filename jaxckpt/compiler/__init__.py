"""What the compiler says: bytes from compiled programs, FLOPs by phase."""
