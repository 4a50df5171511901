"""The choice of a decode worker for each request: an index of their prefix caches, and a cost.

Everything here is pure: numbers in, a decision with its reason out. It imports `runtime` alone and
no torch. Begin with `policy.py`; `by_cost.py` is the default policy.
"""
