"""Scripts that run in another process: parsers of native libraries, launchers of targets."""
