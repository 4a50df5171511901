"""A follower that replays decode steps without a GPU, as its rank 0 must do too."""

from functools import partial
from typing import Any

from tandem.engine.execution import follower
from tests.engine.step_doubles import CallAgain

if __name__ == "__main__":
    own: Any = follower
    own.ModelRunner = partial(follower.ModelRunner, recorder=CallAgain())
    follower.main()
