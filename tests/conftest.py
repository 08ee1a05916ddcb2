"""What all tests need from their process."""

from __future__ import annotations

import signal

# A shell that runs tests in the background starts them with SIGINT ignored, and programs started by tests would inherit
# that: those that are told to stop by Ctrl-C would not.
signal.signal(signal.SIGINT, signal.default_int_handler)
