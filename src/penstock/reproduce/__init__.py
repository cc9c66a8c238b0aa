"""The papers' numbers beside ours, number by number, each with how ours was obtained and a verdict."""
