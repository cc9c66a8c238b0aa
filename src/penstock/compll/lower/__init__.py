"""From the IR to passes over memory, to bytes of the payload, and to what the host knows before a call."""
