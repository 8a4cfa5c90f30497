"""How fast cronlock is, against its peers, measured in the same run: `./run bench`."""
