"""Bodies of requests: their memory, their fields within bounds, typed structs of them."""
