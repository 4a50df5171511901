"""A bounded amount that requests share, such as the memory of their bodies."""


class Room:
    """An amount of which requests take a part for a time.

    One API key has at most as much as is left then, or `least` if that is more: alone it gets half,
    beside others that have much an equal part. So no key takes the last of it from a new one.
    """

    def __init__(self, limit: int, least: int = 1) -> None:
        self.limit = limit
        self.num_taken = 0
        self._least = least
        self._by_key: dict[str, int] = {}  # name |-> what it has, without zeros

    def take(self, amount: int, key: str) -> bool:
        """Take an amount for the holder of a key, empty without keys. False if it is too much."""
        num_left = self.limit - self.num_taken - amount
        if num_left < 0:
            return False
        if key:
            num_own = self._by_key.get(key, 0) + amount
            if num_own > max(self._least, num_left):
                return False
            self._by_key[key] = num_own
        self.num_taken += amount
        return True

    def give_back(self, amount: int, key: str) -> None:
        """Give back what was taken."""
        self.num_taken -= amount
        if key:
            self._by_key[key] -= amount
            if not self._by_key[key]:
                del self._by_key[key]
