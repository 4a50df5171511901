"""The profiles of emulated devices, from published figures."""
