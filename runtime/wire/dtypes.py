"""The kinds of numbers that models compute in and K/V is stored in."""

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
