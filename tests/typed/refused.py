"""Mistakes in options that type checkers find: one a line."""

from penstock.torch import Compression, Planning

Compression(codek="onebit")
Compression(clip_by="layer")
Compression(density="0.01")
Planning(planer="exact")
Planning(measure_seconds="ten")
