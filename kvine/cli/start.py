"""Where the `kvine` script begins: Ctrl-C ends it without a traceback while the commands are still being imported."""

import gc
import signal
import sys

INTERRUPTED = 130  # 128 + SIGINT, as the commands end


def main() -> None:
    """Entry point of the `kvine` script."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvine.cli.app import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    except KeyboardInterrupt:  # before the command has begun, or after it
        sys.exit(INTERRUPTED)
    finally:
        gc.freeze()  # the interpreter would search all of torch for cycles on its way out, for most of a second
