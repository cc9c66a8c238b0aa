"""The clock: a discrete-event engine, and the two things it times: programs and training iterations."""
