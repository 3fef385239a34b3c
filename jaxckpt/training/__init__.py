"""Command-line training: configuration, data, sharding, loop, snapshots."""
