"""NVIDIA Dynamo's names, and how code that imports them is ported."""
