"""Engines: their contract, the types of requests and answers, and what they report."""
