"""What happens to a bucket between "gradients are ready" and "the average is there", without any framework.

`exchange.py` is the way in: start a bucket, wait for it. `averaging.py` averages one parcel; `residuals.py` and
`parameter_state.py` keep what is owed; `compression.py` says what a user may ask for; `state.py` is what checkpoints
hold; `arrays.py` is what an adaptor supplies for gradients that are not numpy arrays.
"""
