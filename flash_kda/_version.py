"""The one home of the version; `setup.py` reads this line as text, without importing the package."""

__version__ = "0.1.0"
