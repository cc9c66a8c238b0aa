"""How many seconds: closed forms of the papers, lines fitted to measurements, and published clusters by name."""
