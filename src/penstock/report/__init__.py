"""Pictures and files for people: timelines, scaling curves, drawn programs. Nothing in the library imports this."""
