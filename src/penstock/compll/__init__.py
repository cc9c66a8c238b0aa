"""CompLL: gradient compressors written in twenty lines, compiled to the CPU and to the GPU."""
