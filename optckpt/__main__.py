"""The command line: `optckpt`, or `python -m optckpt`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; ends the process."""
    try:
        # Takes a second, in which Ctrl-C deserves an answer, too.
        from optckpt.cli import main as run
    except KeyboardInterrupt:
        if "--json" in sys.argv:
            print('{"error": "interrupted", "kind": "KeyboardInterrupt"}')
        sys.stderr.write("optckpt: error: interrupted\n")
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
