"""One step on the device: its batch, its launch, its outcome."""
