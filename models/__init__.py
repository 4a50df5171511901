"""The bundled model, models of the hub, and random models of any shape.

It imports engine and runtime. Begin with `paths.py`.
"""
