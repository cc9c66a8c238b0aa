"""From the text of a compressor to its IR; `source.compile_source` is the way in."""
