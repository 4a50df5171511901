"""The KV pool's memory and how much of the device it may take."""
