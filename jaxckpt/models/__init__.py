"""The shipped transformer: presets, attention, blocks and chunked loss."""
