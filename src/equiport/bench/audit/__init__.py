"""The audit measured: how many cheats it finds, how many honest files it flags."""
