"""What this machine can do and what it lacks: small checks that `penstock doctor` runs one after the other."""
