"""Answers that follow a grammar: its compilation, and the tokens that it allows next.

Compilation runs in a process of its own, masks on threads. It imports `runtime` alone; an engine
sees `engine/schedule/matcher.py`. Begin with `matcher.py`.
"""
