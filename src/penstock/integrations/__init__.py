"""Training frameworks around torch, with our wrapper in the place of stock DDP.

    from penstock.integrations.accelerate import Accelerator       # was: from accelerate import Accelerator
    from penstock.integrations.transformers import Trainer         # was: from transformers import Trainer
    from penstock.integrations.lightning import Trainer            # was: from lightning.pytorch import Trainer
    from penstock.integrations.metrics import TensorBoardCallback, WandbCallback

Each module imports its framework, and nothing else here does. Checkpoints of these frameworks hold the residuals too:
a file for every rank beside or in the checkpoint (`exchange_files.py`).
"""
