"""What `python -m jaxckpt.selftest` and the gate before offloading runs are made of."""
