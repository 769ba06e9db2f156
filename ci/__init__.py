"""The factory: everything between a source tree and a verified wheel.  Nothing here is installed."""
