"""python -m tests.bad.count: how many bad inputs the tests try, by kind. A test that passes has tried all of them."""

from tests.bad.commands import COMMANDS
from tests.bad.mutations import EXAMPLES
from tests.bad.targets import TARGETS


def counts() -> dict[str, int]:
    """Changed files, by directory, and bad command lines."""
    return {group: len(targets) * EXAMPLES for group, targets in TARGETS.items()} | {"command lines": len(COMMANDS)}


if __name__ == "__main__":
    for kind, count in counts().items():
        print(f"{kind:<14} {count:>9,}")
    print(f"{'all':<14} {sum(counts().values()):>9,}")
