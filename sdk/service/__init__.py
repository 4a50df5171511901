"""Graphs of services: `@service`, `depends`, their processes."""
