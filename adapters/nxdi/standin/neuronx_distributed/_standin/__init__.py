"""The stand-in's own machinery; the real package has no such folder."""
